"""What the endpoint warns of: each alarm where its fault is, none in a healthy run."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from fixtures import tiny_tokenizer

from rlflow.report.alarms import LASTING, Watch
from rlflow.report.metrics import label, training_name
from tests.unit.environments.endpoint.scripted import checked, environment, play
from tests.unit.rollout.chat_templates import QWEN3, dressed

pytest.importorskip("openai")
pytest.importorskip("starlette")
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
AGENT = """
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

async def agent(task, client):
    messages = [{"role": "user", "content": task["prompt"]}]
    for number in range(4):
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[LOOK])
        messages.append(reply.choices[0].message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "found"}
                     for call in reply.choices[0].message.tool_calls or ()]
        messages.append({"role": "user", "content": "and?"})
        if REWRITES:
            messages = [{"role": "user", "content": f"So far: {number}"}]
        if STRANGER:
            try:
                await client.copy(base_url=str(client.base_url).replace(client.api_key, "none"), api_key="none").models.list()
            except openai.AuthenticationError:
                pass
    return 1
"""
CASES: dict[str, tuple[str, bool, bool, str]] = {
    "healthy": (CALL, False, False, ""),
    "one call fails": (CALL + "<tool_call>{</tool_call>", False, False, ""),
    "calls none": ("I know it", False, False, "tools_unused"),
    "cannot call": ("<tool_call>{</tool_call>", False, False, "unreadable_calls"),
    "does not end its calls": ("<tool_call>{", False, False, "unreadable_calls"),
    "rewrites": (CALL, True, False, "broken_histories"),
    "stranger": (CALL, False, True, "endpoint/outside"),
}


@pytest.mark.parametrize("says, rewrites, stranger, name", CASES.values(), ids=list(CASES))
def test_each_alarm_is_raised_by_its_fault_alone(
    says: str, rewrites: bool, stranger: bool, name: str, tmp_path: Path
) -> None:
    tokenizer = dressed(tiny_tokenizer(tmp_path), QWEN3)
    made = environment(tmp_path, f"REWRITES, STRANGER = {rewrites}, {stranger}\n{AGENT}")
    found, fed = play(
        made, tokenizer, lambda text, number: says, episodes=1, max_response_tokens=400
    )
    checked(found[0], fed)
    told = {key: statistics.fmean(one.metrics[key] for one in found) for key in found[0].metrics}
    metrics = {training_name(key, made.metrics): value for key, value in told.items()} | fed.report
    watch = Watch(made.metrics)
    faults = [fault.name for step in range(LASTING) for fault in watch.observe(step, metrics)]
    own = {label(key) for key in made.metrics}
    assert [fault for fault in faults if fault in own] == ([label(name)] if name else [])
