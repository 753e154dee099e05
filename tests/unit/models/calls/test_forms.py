"""Each form that families write calls in: what its templates render is read back; what is broken is one call that failed; thoughts
are none."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlflow.models.calls import FORMS, form_of
from rlflow.models.calls.form import TextCall
from rlflow.models.calls.reader import CallReader, ReadResponse

Arguments = dict[str, Any]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {
                "river": {"type": "string"},
                "most": {"type": "integer"},
                "share": {"type": ["number", "null"]},
                "open": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "ids": {"type": "array"},
                "where": {"type": "object"},
                "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            },
        },
    },
}


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def json_blocks(calls: list[TextCall]) -> str:
    objects = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return "\n".join(f"<tool_call>\n{text_of(one)}\n</tool_call>" for one in objects)


def xml_blocks(calls: list[TextCall]) -> str:
    def block(call: TextCall) -> str:
        values = "".join(
            f"<parameter={key}>\n{text_of(value)}\n</parameter>\n"
            for key, value in call.arguments.items()
        )
        return f"<tool_call>\n<function={call.name}>\n{values}</function>\n</tool_call>"

    return "\n".join(map(block, calls))


def key_blocks(calls: list[TextCall]) -> str:
    def block(call: TextCall) -> str:
        values = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{text_of(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        return f"<tool_call>{call.name}\n{values}</tool_call>"

    return "\n".join(map(block, calls))


def mistral_list(calls: list[TextCall]) -> str:
    return f"[TOOL_CALLS] {text_of([{'name': one.name, 'arguments': one.arguments, 'id': '123456789'} for one in calls])}"


def mistral_named(calls: list[TextCall]) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{text_of(call.arguments)}" for call in calls)


def deepseek_v3(calls: list[TextCall]) -> str:
    each = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{text_of(call.arguments)}\n```<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[TextCall]) -> str:
    each = "".join(
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{text_of(call.arguments)}<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def harmony(calls: list[TextCall]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{text_of(call.arguments)}<|call|>"
        for call in calls
    )


def harmony_template(calls: list[TextCall]) -> str:
    return "".join(
        f"<|start|>assistant to=functions.{call.name}<|channel|>commentary json<|message|>{text_of(call.arguments)}<|call|>"
        for call in calls
    )


def json_objects(calls: list[TextCall]) -> str:
    return "; ".join(text_of({"name": one.name, "parameters": one.arguments}) for one in calls)


def python_tag(calls: list[TextCall]) -> str:
    return f"<|python_tag|>{json_objects(calls)}"


def pythonic(calls: list[TextCall]) -> str:
    each = (
        f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        for call in calls
    )
    return f"[{', '.join(each)}]"


WRITERS: dict[Callable[[list[TextCall]], str], str] = {
    json_blocks: "json blocks",
    xml_blocks: "xml blocks",
    key_blocks: "key blocks",
    mistral_list: "mistral",
    mistral_named: "mistral",
    deepseek_v3: "deepseek",
    deepseek_v31: "deepseek",
    harmony: "harmony",
    harmony_template: "harmony",
    json_objects: "json objects",
    python_tag: "json objects",
    pythonic: "pythonic",
}
BY_NAME = {form.name: form for form in FORMS}
WHOLE = (json_objects, pythonic)
"""Without a mark: the response is nothing else."""
ARGUMENTS: list[Arguments] = [
    {"river": "Ilda", "most": 3},
    {},
    {
        "river": "12",
        "most": -1,
        "share": 0.5,
        "open": True,
        "ids": [1, "a", None],
        "where": {"a": {"b": []}},
    },
    {"river": "a \"b\" 'c' \\n\n\n  <x> ü \U0001f600", "share": None, "open": None, "either": "x"},
    {
        "river": "</tool_call> </parameter> </arg_value> <|call|> [TOOL_CALLS] ``` <think> </think>",
        "either": 7,
    },
    {"river": "", "ids": []},
]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("known", [True, False], ids=["by template", "by marks"])
def test_calls_are_read_back_as_they_were_written(writer: Any, known: bool) -> None:
    reader = CallReader(BY_NAME[WRITERS[writer]], False) if known else CallReader(in_thought=False)
    for first in ARGUMENTS:
        for calls in (
            [TextCall("find", first)],
            [TextCall("find", first), TextCall("look.up", {"river": "x"})],
        ):
            if not known and writer is key_blocks and {} in (first, calls[-1].arguments):
                continue  # a name alone is a call where the template says so
            assert reader.read(writer(calls), [TOOL]).found == tuple(calls)


@pytest.mark.parametrize("writer", [one for one in WRITERS if one not in WHOLE])
def test_text_around_calls_stays(writer: Any) -> None:
    text = f"<think>\nh\n</think>\n\nI look.\n{writer([TextCall('find', {'river': 'Ilda'})])}"
    read = CallReader(BY_NAME[WRITERS[writer]], False).read(text)
    assert read == ReadResponse(
        "<think>\nh\n</think>\n\nI look.", (TextCall("find", {"river": "Ilda"}),)
    )


@pytest.mark.parametrize("writer", WRITERS)
def test_what_the_model_only_thought_is_no_call(writer: Any) -> None:
    form, call = BY_NAME[WRITERS[writer]], writer([TextCall("find", {"river": "Ilda"})])
    for reader in (CallReader(form), CallReader(form, False), CallReader()):
        for text in (f"<think>{call}", f"<think>{call}</think>no", f"\n<think>\n{call}</think>"):
            assert reader.read(text) == ReadResponse(text)
        said = reader.read(f"<think>{call}</think>{call}")
        assert said.calls == [TextCall("find", {"river": "Ilda"})]
    opened = CallReader(form, in_thought=True)
    assert opened.read(call) == ReadResponse(call)
    assert opened.read(f"maybe {call}</think>\n{call}").calls == [
        TextCall("find", {"river": "Ilda"})
    ]
    if writer not in WHOLE and writer is not python_tag:
        later = f"{call}\n<think>or {call}"
        assert CallReader(form, False).read(later).calls == [TextCall("find", {"river": "Ilda"})]


BROKEN = {
    "json blocks": [
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>find</tool_call>",
    ],
    "xml blocks": [
        "<tool_call>{}</tool_call>",
        "<tool_call><function=find></tool_call>",
        "<tool_call><function=find><parameter=a>b</function></tool_call>",
    ],
    "key blocks": [
        "<tool_call></tool_call>",
        '<tool_call>{"name": "find"}</tool_call>',
        "<tool_call>find<arg_key>a</arg_key></tool_call>",
        "<tool_call>find<arg_key>a</arg_key><arg_value>b</tool_call>",
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [{]",
        "[TOOL_CALLS]find[ARGS]{",
        "[TOOL_CALLS]find[ARGS]3",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜>find<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{\n```<｜tool▁call▁end｜>",
    ],
    "harmony": [
        "<|channel|>commentary to=functions.find <|constrain|>json<|message|>{<|call|>",
        "<|channel|>commentary to=functions.find<|message|>3",
    ],
    "json objects": ['{"name": }', '<|python_tag|>{"name": ', "<|python_tag|>find()"],
    "pythonic": [
        "[find(a)]",
        "[find(a=b)]",
        "[find(a=g(b=1))]",
        "[find(a=(1, 2))]",
    ],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts]
)
def test_a_broken_call_is_one_that_failed(name: str, text: str) -> None:
    read = CallReader(BY_NAME[name], False).read(f"{text}\n")
    assert (read.calls, read.failed, read.unclosed) == ([], 1, False)
    assert read.shape == BY_NAME[name].shape and read.content == f"{text}\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json blocks", '<tool_call>{"name": "find"}'),
        ("xml blocks", "<tool_call><function=find><parameter=a>\nb\n</parameter>"),
        ("xml blocks", "<tool_call><function=find><parameter=a>\nb"),
        ("key blocks", "<tool_call>find<arg_key>a</arg_key><arg_value>b</arg_value>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{}"),
    ],
)
def test_a_call_that_does_not_end_is_not_made(name: str, text: str) -> None:
    read = CallReader(BY_NAME[name], False).read(text)
    assert read == ReadResponse(text, (), unclosed=True) and read.shape == BY_NAME[name].shape


def test_a_list_that_is_no_call_is_an_answer() -> None:
    for answer in ("[sin(x)]", "[1, 2]", "[f(x=1), g]"):
        assert CallReader().read(answer) == ReadResponse(answer)


def test_one_broken_call_leaves_the_others() -> None:
    right = TextCall("find", {"river": "Ilda"})
    for writer, name in WRITERS.items():
        if name in ("pythonic", "json objects") or writer is mistral_list:
            continue  # one value, which is read or not
        text = f"{BROKEN[name][0]}\n{writer([right])}"
        read = CallReader(BY_NAME[name], False).read(text)
        assert read.calls == [right] and read.failed == 1, name


def test_a_template_is_of_the_form_whose_mark_it_has() -> None:
    templates = {
        '\'<tool_call>\\n{"name": "\' + tool_call.name': "json blocks",
        "'<tool_call>\\n<function=' + name + '>\\n' '<parameter=' + key": "xml blocks",
        "'\\n<tool_call>' + tc.name <arg_key>{{ k }}</arg_key>": "key blocks",
        '"[TOOL_CALLS] ["': "mistral",
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'": "deepseek",
        "'<|start|>assistant to=functions.' '<|channel|>commentary json<|message|>'": "harmony",
        '\'Respond in the format {"name": function name, "parameters": dictionary\' \'"parameters": \'': "json objects",
        "<|python_tag|>": "json objects",
        "[func_name1(params_name1=params_value1), func_name2(params)]": "pythonic",
    }
    for template, name in templates.items():
        form = form_of(template)
        assert form is not None and form.name == name
    assert form_of("{% for m in messages %}{{ m.content }}{% endfor %}") is None


def test_arguments_get_the_types_of_the_schema() -> None:
    values = {
        "river": "12",
        "most": "x",
        "either": "12",
        "share": "None",
        "open": "True",
        "new": "[1]",
        "other": "a b",
    }
    (call,) = CallReader().read(xml_blocks([TextCall("find", values)]), [TOOL]).calls
    assert call.arguments == {
        "river": "12", "most": "x", "either": 12, "share": None, "open": True, "new": [1], "other": "a b"}  # fmt: skip
    odd = [
        {"type": "function"},
        {"function": {"name": "find", "parameters": {"properties": {"river": {"anyOf": 3}}}}},
        {"function": 3},
    ]
    assert CallReader().read(xml_blocks([TextCall("find", {"river": "12"})]), odd).calls[
        0
    ].arguments == {"river": 12}


UNITS = (
    "<tool_call>", "<tool_call>\n<function=f><parameter=a>", "<tool_call><function=f><parameter=a></tool_call>",
    "<tool_call>f<arg_key>k</arg_key><arg_value></tool_call>", "<tool_call>f<arg_key>", '<tool_call>["</tool_call>",',
    "<tool_call>" + " " * 40, "[TOOL_CALLS]", "[TOOL_CALLS]a[ARGS]", '[TOOL_CALLS]["', "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "to=functions.a ", '<|channel|>a to=functions.f<|message|>"',
    "<|channel|>", "<think>", "</think>", "<think></think>", "[f(", "[f(a='", '{"name"', "<|python_tag|>", "</parameter>  ",
    "</function></tool_call> ",
)  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_reading_takes_time_linear_in_the_text(unit: str) -> None:
    text = unit * (250_000 // len(unit))
    touched = [form for form in FORMS if not form.opening or re.search(form.opening, text)]
    for reader in (CallReader(), *(CallReader(form, False) for form in touched)):
        begun = time.process_time()
        reader.read(text)
        assert time.process_time() - begun < 0.6, reader
