from __future__ import annotations

from pathlib import Path

import pytest
from fixtures import tiny_tokenizer
from transformers import AddedToken

from rlflow.errors import ModelError, RolloutError
from rlflow.rollout.tokenizer import Tokenizer, token_texts
from rlflow.types import StopReason
from tests.unit.rollout.chat_templates import MISTRAL_V3, Talk, metaspace, played

USER = {"role": "user", "content": "Where was Orvan Telmik born?"}
TOOL = {"role": "user", "content": "Doc 1: in Vasmere."}
QWEN3_LIKE = (  # drops the thinking of every turn but the last, as Qwen3's template does
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_LIKE = (
    "{{ '<|endoftext|>' }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(directory)


@pytest.mark.parametrize(
    "text", ["", " ", "a  b ,c .", "<|im_end|>", "\n\n<information>é☃</information>", "it 's"]
)
def test_text_survives_encoding_exactly(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    assert len(tokens) == len(tokenizer.inner.encode(text, add_special_tokens=False))


def test_special_tokens_are_stripped_on_demand(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("<answer>x</answer><|im_end|>")
    assert tokenizer.decode(tokens) == "<answer>x</answer>"
    assert tokenizer.eos_ids[0] == tokens[-1]
    assert set(tokens) & tokenizer.special_ids == {tokens[-1]}
    stripped = {token for token in range(len(tokenizer)) if not tokenizer.decode([token])}
    assert tokenizer.special_ids == stripped


def test_generation_config_adds_ends(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert Tokenizer.from_pretrained(tmp_path).eos_ids == (2, 0)


def test_text_prompts_are_verbatim_unless_the_template_is_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_prompt("Question: x") == tokenizer.encode("Question: x")
    expected = "<|im_start|>user\nQuestion: x<|im_end|>\n<|im_start|>assistant\n"
    assert (
        tokenizer.decode(tokenizer.encode_prompt("Question: x", chat_template=True), False)
        == expected
    )
    assert tokenizer.encode_prompt(
        [{"role": "user", "content": "Question: x"}]
    ) == tokenizer.encode(expected)
    again = tokenizer.encode_prompt(
        expected
    )  # as RLinf's prompts, which went through the template already
    assert tokenizer.decode(again, False) == expected and tokenizer.special_ids & set(again)


@pytest.mark.parametrize("template", [None, LLAMA_LIKE, PLAIN])
@pytest.mark.parametrize("ended", [True, False])
def test_turns_concatenate_to_one_full_render(
    tokenizer: Tokenizer, template: str | None, ended: bool
) -> None:
    if template:
        tokenizer.inner.chat_template = template
    (end,) = tokenizer.eos_ids
    responses = ["I search. <search>Orvan</search>", "<search>Vasmere</search>"]
    messages = [USER]
    tokens = tokenizer.encode_prompt(messages)
    for response in responses:
        sampled = tokenizer.encode(response) + [end] * ended
        tokens += (
            sampled
            + tokenizer.encode_turn(messages, response, [TOOL], end if ended else None).tokens
        )
        messages = [*messages, {"role": "assistant", "content": response}, TOOL]
    assert tokens == tokenizer.encode(tokenizer.render(messages))


@pytest.mark.parametrize(
    "template, response",
    [(QWEN3_LIKE, "<think>hm</think> <search>x</search>"), (LLAMA_LIKE, " <search>x</search> ")],
)
def test_a_template_that_rewrites_earlier_turns_shows_all_of_them_anew(
    tokenizer: Tokenizer, template: str, response: str
) -> None:
    tokenizer.inner.chat_template = template
    turn = tokenizer.encode_turn([USER], response, [TOOL], None)
    after = tokenizer.render([USER, {"role": "assistant", "content": response}, TOOL])
    assert turn.tokens == tokenizer.encode(after) and 0 < (turn.again or 0) < len(turn.tokens)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *(("tokenizer.json", text) for text in ("[]", "7", "null", '{"version": 3}')),
        *(("tokenizer_config.json", text) for text in ("[]", "7", '{"eos_token": 7}')),
        *(("generation_config.json", text) for text in ("[]", "{", '{"eos_token_id": [[1]]}')),
        ("special_tokens_map.json", "[]"),
    ],
)
def test_a_file_that_holds_something_else_is_one_clear_error(
    file: str, text: str, tmp_path: Path
) -> None:
    tiny_tokenizer(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ModelError, match=str(tmp_path)):
        Tokenizer.from_pretrained(tmp_path)


def test_missing_things_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.inner.chat_template = None
    with pytest.raises(
        ModelError, match=r"no chat template, but rollout.chat_template is true, or a prompt"
    ):
        tokenizer.encode_prompt([USER])
    with pytest.raises(ModelError, match="nope: no such model directory"):
        Tokenizer.from_pretrained("nope")  # the hub is not asked
    with pytest.raises(ModelError, match="no tokenizer that transformers can read"):
        Tokenizer.from_pretrained(tmp_path)


def _with_controls(directory: Path) -> Tokenizer:
    inner = Tokenizer.from_pretrained(directory).inner
    inner.add_special_tokens(
        {"additional_special_tokens": ["[INST]", "[gMASK]", "<image>", "\u2603"]}
    )
    inner.add_tokens(["<|fim_prefix|>", "[TOOL]", "<think>"])
    return Tokenizer(inner)


@pytest.mark.parametrize(
    "text",
    [
        "[INST]",
        "<image>",
        "[gMASK]",
        "<|im_end|>",
        "\u2603",
        "<|fim_prefix|>",
        "[TOOL]",
        "<|im_<|im_end|>end|>",
    ],
)
def test_no_text_of_an_environment_becomes_a_control_token(directory: Path, text: str) -> None:
    tokenizer = _with_controls(directory)
    controls = {
        *tokenizer.special_ids,
        *tokenizer.inner.convert_tokens_to_ids(["<|fim_prefix|>", "[TOOL]"]),
    }
    assert controls & set(tokenizer.encode(text))
    for said in (text, f"Doc 1: {text}{text} and {text}"):
        tokens = tokenizer.encode_text(said)
        assert not controls & set(tokens)
        assert tokenizer.decode(tokens, skip_special_tokens=False).replace(" ", "") == said.replace(
            " ", ""
        ).replace("\u2603", "")
    messages = [
        USER,
        {"role": "assistant", "content": "x"},
        {"role": "tool", "content": f"found {text}"},
    ]
    harmless = [*messages[:2], {"role": "tool", "content": "found it"}]
    counts = [
        sum(token in controls for token in tokenizer.encode(tokenizer.render(chat)))
        for chat in (messages, harmless)
    ]
    assert counts[0] == counts[1]
    said = [tokenizer.render([{"role": "assistant", "content": own}]) for own in (text, "it")]
    counts = [sum(token in controls for token in tokenizer.encode(own)) for own in said]
    assert counts[0] == counts[1]
    assert text not in str(tokenizer._quoted([{"name": text, "arguments": {text: [text, 1.5]}}]))
    answered = tokenizer.encode_turn(messages[:1], "x", messages[2:], None).tokens
    quiet = tokenizer.encode_turn(messages[:1], "x", harmless[2:], None).tokens
    assert sum(token in controls for token in answered) == sum(token in controls for token in quiet)


class Parts:
    """A tokenizer of bytes, without the blank that a text begins with, as SentencePiece has it."""

    decoded = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(tokens)
        return bytes(tokens).decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize(
    "text", ["é🙂 a  🙂", "a b", "\ufffd a\ufffd", "", b"\xc3(\x80\xf0\x9f", b"\x80" * 500]
)
def test_the_texts_of_tokens_are_the_text(text: str | bytes) -> None:
    tokens = list(text.encode() if isinstance(text, str) else text)
    whole = Parts().decode(tokens)
    parts = Parts()
    texts = token_texts(parts, tokens)
    assert "".join(texts) == whole and len(texts) == len(tokens)
    assert parts.decoded <= 40 * len(tokens)
    assert text != "a b" or texts == ["a", " ", "b"]


def test_words_of_a_protocol_and_ordinary_text_are_encoded_as_ever(directory: Path) -> None:
    tokenizer = _with_controls(directory)
    for text in ("\n\n<information>a [b] <c></information>\n<think>\n", "", "x"):
        assert tokenizer.encode_text(text) == tokenizer.encode(text)
    assert tokenizer.encode_prompt("<|im_start|>user") == tokenizer.encode("<|im_start|>user")


def test_half_a_surrogate_pair_is_a_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_text("a\ud83d b")) == "a\ufffd b"
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("\U0001f600")


def test_what_follows_other_text_begins_with_no_blank_of_its_own() -> None:
    tokenizer = Tokenizer(metaspace())
    said = tokenizer.encode("q")
    for text in ("<i>no</i>", "no", " no", "\nno", ""):
        assert tokenizer.decode(said + tokenizer.encode_text(text)) == f"q{text}"
    assert tokenizer.encode_text("no", follows=False) == tokenizer.encode("no")


@pytest.mark.parametrize("end", ["</s>", "<|end|>", ""])
def test_what_follows_a_response_has_the_ids_of_the_whole_conversation(end: str) -> None:
    inner = metaspace()
    taking = AddedToken(
        "<|end|>", rstrip=True, normalized=False
    )  # the blanks behind it, as Phi-3's
    inner.add_tokens([taking], special_tokens=True)
    inner.chat_template = (
        "{% for message in messages %}{{ message.content + 'END\n' }}{% endfor %}".replace(
            "END", end
        )
    )
    tokenizer = Tokenizer(inner)
    closing = inner.convert_tokens_to_ids(end) if end else None
    turn = tokenizer.encode_turn([USER], "q", [TOOL], closing)
    whole = tokenizer.encode(tokenizer.render([USER, {"role": "assistant", "content": "q"}, TOOL]))
    seen = (
        tokenizer.encode(tokenizer.render([USER]))
        + tokenizer.encode("\nq")[2:]
        + ([closing] if end else [])
    )
    assert seen + turn.tokens == whole


def test_a_rewritten_conversation_tells_how_many_tokens_stand_for_what_was_in_view() -> None:
    inner = metaspace()
    inner.chat_template = (
        "{% for message in messages %}{{ message.content | replace('x', '') }}{% endfor %}"
    )
    tokenizer = Tokenizer(inner)
    turn = tokenizer.encode_turn([USER], "xq", [{"role": "tool", "content": "no"}], None)
    assert turn.tokens == tokenizer.encode(f"{USER['content']}qno")
    assert turn.again == len(tokenizer.encode(f"{USER['content']}q"))


def test_a_template_that_refuses_messages_is_told_in_a_line() -> None:
    tokenizer = Tokenizer(metaspace())
    tokenizer.inner.chat_template = MISTRAL_V3
    with pytest.raises(
        RolloutError,
        match=r"refuses messages of the roles system, user: roles must alternate; expected .*$",
    ):
        tokenizer.encode_prompt([{"role": "system", "content": "Be brief."}, USER])
    said = [tokenizer.encode("no")]
    one, _ = played(
        tokenizer, [USER], said, Talk([[{"role": "tool", "content": "5"}]]), max_turns=2
    )
    assert (
        one.stop is StopReason.ABORTED
        and "refuses messages of the roles user, assistant, tool" in one.error
    )


def test_so_is_one_that_cannot_take_the_arguments_of_a_call_apart() -> None:
    tokenizer = Tokenizer(metaspace())
    tokenizer.inner.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for key, _ in c.function.arguments | items %}{{ key }}"
        "{% endfor %}{% endfor %}{% endfor %}"
    )
    called = {"type": "function", "function": {"name": "search", "arguments": "{"}}
    with pytest.raises(
        RolloutError,
        match=r"refuses messages of the roles user, assistant: Can only get item pairs",
    ):
        tokenizer.render([USER, {"role": "assistant", "content": "", "tool_calls": [called]}])
