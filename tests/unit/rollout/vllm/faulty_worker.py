"""The worker of rlflow with real vLLM, in which faults are planted: those that engines are known to have. For vLLM's interpreter.

RLFLOW_PLANTED=raw starts vLLM with its own default of log-probs; the others are switched on and off by the message `plant`."""

from __future__ import annotations

import os
from typing import Any

import watched_worker
from rlflow_vllm.vllm import worker

planted = ""


def sampling_arguments(message: Any) -> dict[str, Any]:
    """At another temperature than the one that is asked for."""
    arguments = original(message)
    if planted == "temperature" and arguments["temperature"] > 0:
        arguments["temperature"] += 0.2
    return arguments


class FaultyServer(watched_worker.WatchedServer):
    """Does as told by `plant`."""

    async def do_plant(self, message: dict[str, Any]) -> None:
        global planted
        planted = message["fault"]
        worker.PAUSE["clear_cache"] = planted != "cache_kept"
        self._spans = planted != "no_spans"

    async def do_finish_update(self, message: dict[str, Any]) -> None:
        if planted != "other_version":
            await super().do_finish_update(message)
        else:
            await self._engine.finish_weight_update()  # the new weights under the old version


original = worker.sampling_arguments
worker.sampling_arguments = sampling_arguments
worker.VLLMServer = FaultyServer  # type: ignore[misc]
if os.environ.get("RLFLOW_PLANTED") == "raw":
    worker.LOGPROBS = "raw_logprobs"

if __name__ == "__main__":
    worker.main()
