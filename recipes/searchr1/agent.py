"""An agent on OpenAI's client that plays the demo: it asks the policy, searches, and asks again.

`bash recipes/searchr1/run_train.sh agent` trains it. CORPUS names the passages that it searches."""

import os
from typing import Any

from rlflow_environments import search

CORPUS = search.Corpus(os.environ["CORPUS"])
PASSAGES = search.CoalescedSearch(search.make_retriever({"name": "dense"}, CORPUS))
"""What agents search at the same time is one batch, beside the event loop."""


async def agent(task: dict[str, Any], client: Any) -> None:
    messages = [{"role": "user", "content": task["prompt"]}]
    asked = {"model": "policy", "messages": messages, "stop": ["</search>", "</answer>"]}
    while True:
        reply = await client.chat.completions.create(
            **asked, extra_body={"include_stop_str_in_output": True}
        )
        said = reply.choices[0].message.content
        messages.append({"role": "assistant", "content": said})
        action = search.parse_action(said)
        if action is None:
            found = search.INVALID_ACTION
        elif action.kind == "search":
            found = search.format_observation(await PASSAGES.search(action.content, 3))
        else:
            return
        messages.append({"role": "user", "content": found})


def reward(task: dict[str, Any], played: dict[str, Any]) -> float:
    said = [one["content"] for one in played["messages"] if one["role"] == "assistant"]
    answered = search.parse_action(said[-1]) is not None and "</answer>" in said[-1]
    return search.searchr1_em("".join(said), task["solutions"]) if answered else 0.0
