"""What the embedded engine takes of memory, before it is made."""

from __future__ import annotations

from collections.abc import Mapping

from rlflow.rollout.embedded.block_manager import BLOCK_SIZE, blocks_for
from rlflow.rollout.embedded.devices import device_of
from rlflow.rollout.engine_facts import EngineFacts, EngineLoad

FIRST_DECODE = 8 * 2**20
"""What the first decode step leaves, whatever the shapes: 48 MiB were measured on Intel, 0 to 32 on
AMD (Zen 2)."""
CACHE, SAMPLING = "keys and values", "sampling"


class EmbeddedFacts(EngineFacts):
    """Weights, keys and values, and a step's logits, all in the run's own process."""

    in_process = True
    memory_known = True
    takes_adapters = True

    def sleeps(self, on_gpus: bool) -> bool:
        asked = self.options.get("sleep")
        return on_gpus if asked is None else bool(asked)

    def memory(self, load: EngineLoad, free: int | None = None) -> dict[str, int]:
        """Keys and values are those of all slots, or of `kv_tokens`; where neither is said, they
        take half of `free` at the most."""
        model, width = load.model, load.width
        slots = min(int(self.options.get("max_concurrency", 128)), load.episodes)
        limit = self.options.get("max_tokens") or load.max_total_tokens
        blocks = slots * blocks_for(min(limit, load.max_total_tokens))
        both = model.key_dim + model.value_dim
        block_bytes = model.layers * BLOCK_SIZE * model.groups * both * width
        kv_tokens = self.options.get("kv_tokens")
        if kv_tokens is not None:
            blocks = min(blocks, int(kv_tokens) // BLOCK_SIZE)
        elif free is not None:
            blocks = min(blocks, free // 2 // block_bytes)
        decode = slots * model.vocab * 4 * 4  # logits, scaled ones, log-probs, probabilities
        longest = min(load.max_prompt_tokens, load.max_total_tokens)
        prefilled = min(int(self.options.get("prefill_tokens", 8192)), slots * longest)
        attention = model.heads * model.key_dim + 2 * model.groups * both
        activations = 3 * model.hidden + attention + 3 * model.active_ffn
        # With the masks of all that is prefilled in a step
        prefill = prefilled * width * (activations + longest)
        return {
            "engine's weights": load.parameters * width,
            CACHE: blocks * block_bytes,
            SAMPLING: round((1 + load.slack) * max(decode, prefill)) + FIRST_DECODE,
        }

    def idle_memory(self, memory: Mapping[str, int], asleep: bool) -> dict[str, int]:
        given_back = (SAMPLING, CACHE) if asleep else (SAMPLING,)
        return {part: size for part, size in memory.items() if part not in given_back}

    def check_devices(self, ranks: int, gpus_per_rank: float) -> None:
        device_of(self.options.get("device"), self.options.get("cuda_graphs"))
