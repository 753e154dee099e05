"""The worker of rlflow with real vLLM, which also tells how many tokens a request has: tests wait for progress, not for time. For
vLLM's interpreter."""

from __future__ import annotations

from typing import Any

from rlflow_vllm.vllm import worker


class WatchedServer(worker.VLLMServer):
    """Answers `progress` too."""

    async def do_progress(self, message: dict[str, Any]) -> dict[str, Any]:
        """Tokens of the requests that run, by their calls; a request that vLLM does not know yet, or any longer, has none."""
        states = self._engine.output_processor.request_states.values()
        known = {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}
        return {"tokens": [known.get(str(call), 0) for call in message["calls"]]}


worker.VLLMServer = WatchedServer  # type: ignore[misc]

if __name__ == "__main__":
    worker.main()
