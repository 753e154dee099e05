"""Calls in the forms of chat templates, tasks of JSON Lines, and rules."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlflow.errors import ConfigError, DataError, RolloutError
from rlflow.models.calls.json_blocks import FORM
from rlflow.types import Task
from rlflow_environments.common.tool_calls import TOO_DEEP, TextCall, read_calls, unreadable
from rlflow_environments.tool_use.environment import shortened
from rlflow_environments.tool_use.rows import make_rule, read_tasks


def test_calls_are_read_in_the_forms_of_qwen_hermes_and_llama() -> None:
    two = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><tool_call>{"name": "b"}</tool_call>'
    assert read_calls(two) == [TextCall("add", {"a": 1}), TextCall("b", {})]
    assert read_calls(' {"name": "add", "parameters": {"a": [1]}}\n') == [
        TextCall("add", {"a": [1]})
    ]
    assert read_calls('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>') == [
        TextCall("a", {"x": 1})
    ]
    for wrong in (
        "",
        "{",
        "[]",
        '{"name": 3}',
        '{"arguments": {}}',
        "[" * 100_000,
        '{"name": "a", "arguments": "{"}',
    ):
        assert read_calls(f"<tool_call>{wrong}</tool_call>") == [unreadable(FORM.shape)]
    assert read_calls("no call") == []
    for levels, call in ((63, TextCall), (64, str), (900, str)):
        deep = "[" * levels + "]" * levels
        (read,) = read_calls(
            f'<tool_call>{{"name": "a", "arguments": {{"x": {deep}}}}}</tool_call>'
        )
        assert isinstance(read, call) and (call is TextCall or read == TOO_DEEP)


def test_reading_calls_takes_time_linear_in_the_text() -> None:
    begun = time.perf_counter()
    assert len(read_calls("<tool_call>" * 200_000)) == 1
    assert len(read_calls("<tool_call>{</tool_call>" * 50_000)) == 50_000
    assert time.perf_counter() - begun < 5.0


def test_results_are_cut_in_the_middle_and_well_formed() -> None:
    text = shortened("a" * 5_000 + "b" * 5_000)
    assert text.startswith("a" * 4_000 + "\n[2000 characters") and text.endswith("b" * 4_000)
    assert shortened("x\ud800") == "x\ufffd"


def test_rows_are_tasks_and_bad_ones_are_named(tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    own = '{"id": "own", "prompt": [{"role": "user", "content": "b?"}], "answer": "2", "k": 3}'
    data.write_text(f'{{"prompt": "a?", "answer": 1}}\n\n{own}\n')
    tasks = read_tasks(str(data), None, ["answer"], "Be brief.")
    assert tasks["train"] == tasks["val"]
    system = {"role": "system", "content": "Be brief."}
    assert tasks["train"] == [
        Task("train-1", [system, {"role": "user", "content": "a?"}], 1),
        Task("own", [system, {"role": "user", "content": "b?"}], "2", {"k": 3}),
    ]
    data.write_text('{"prompt": "a"}\n{"prompt": [{"role": 1}], "answer": 1}\n{"answer": 1}\n')
    with pytest.raises(
        DataError, match=r"3 of 3 rows .*line 1: 'answer': .*line 2: 'prompt': .*line 3: 'prompt'"
    ):
        read_tasks(str(data), None, ["answer"])


RULES = """
import asyncio

def reward(task, messages, *, scale: float = 1.0):
    return scale * len(messages)

async def later(task, messages):
    await asyncio.sleep(0)
    return 0.5

def words(task, messages):
    return "good"
"""


def test_rules_are_functions_plain_or_not_and_match_compares_answers(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(RULES)
    task = Task("0", [], ["Nine", 9])

    def scored(component: object, said: str = "") -> float:
        return asyncio.run(make_rule(component)(task, [{"role": "assistant", "content": said}]))

    assert scored({"name": f"{tmp_path}/rules.py:reward", "scale": 3}) == 3.0
    assert scored(f"{tmp_path}/rules.py:later") == 0.5
    for said, wanted in (
        ("nine", 1.0),
        ("<think>8</think> 9\n", 1.0),
        ("So <answer> 9 </answer>.", 1.0),
        ("It is 9.", 0.0),
    ):
        assert scored("match", said) == wanted, said
    with pytest.raises(RolloutError, match="expected a number, found"):
        scored(f"{tmp_path}/rules.py:words")
    with pytest.raises(ConfigError, match="unknown name 'matches'"):
        make_rule("matches")


def test_a_rule_that_hangs_keeps_no_process_from_ending(tmp_path: Path) -> None:
    rule = tmp_path / "hangs.py"
    rule.write_text("import time\ndef reward(task, messages):\n    time.sleep(600)\n")
    program = (
        "import asyncio\nfrom rlflow.types import Task\nfrom rlflow_environments.tool_use.rows import make_rule\n"
        f"rule = make_rule({f'{rule}:reward'!r})\n"
        "async def main():\n"
        "    try:\n        await asyncio.wait_for(rule(Task('a', 'p'), []), 0.5)\n"
        "    except TimeoutError:\n        print('given up')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "given up\n"), done.stderr
