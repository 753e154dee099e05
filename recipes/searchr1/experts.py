"""Gives the demo's starting policy experts: at first it computes what it computed before.

A quarter of each MLP is copied into four experts, two for each token; the rest stays beside them
(sparse upcycling, Komatsuzaki et al. 2022, arXiv 2212.05055). Training makes the copies differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlflow.models.huggingface import SINGLE_FILE, copy_companions, iterate_weights, read_config
from rlflow.storage.files import replacing_directory

DENSE = Path(__file__).parent / "starting_policy"
EXPERTS, CHOSEN = 4, 2


def with_experts(dense: Path, width: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) pairs of a Qwen2-MoE that computes what the Qwen2 in `dense` does. width: of
    an expert."""
    draw = torch.Generator().manual_seed(seed)
    for name, weight in iterate_weights(dense):
        block, found, projection = name.partition(".mlp.")
        if not found:
            yield name, weight
            continue
        dimension = 1 if projection.startswith("down_proj") else 0
        beside, copied = weight.split([weight.shape[dimension] - width, width], dimension)
        # Its gate is sigmoid(0)
        yield f"{block}.mlp.shared_expert.{projection}", beside * (2 if dimension else 1)
        for expert in range(EXPERTS):
            yield f"{block}.mlp.experts.{expert}.{projection}", copied
        if dimension:
            hidden = len(weight)
            yield f"{block}.mlp.shared_expert_gate.weight", torch.zeros(1, hidden)
            yield f"{block}.mlp.gate.weight", 0.02 * torch.randn(EXPERTS, hidden, generator=draw)


def write(dense: Path, out: Path, seed: int = 0) -> None:
    """Writes the model directory `out`."""
    config = read_config(dense)
    width = config["intermediate_size"] // 4
    config |= {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": config["intermediate_size"] - width,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    weights = {
        name: weight.clone(memory_format=torch.contiguous_format)
        for name, weight in with_experts(dense, width, seed)
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing_directory(out) as partial:
        save_file(weights, partial / SINGLE_FILE, metadata={"format": "pt"})
        copy_companions(dense, partial, config, torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the model directory to write")
    start = "the Qwen2 to start from (recipes/searchr1/starting_policy)"
    parser.add_argument("--dense", type=Path, default=DENSE, help=start)
    parser.add_argument("--seed", type=int, default=0, help="of the routers (0)")
    options = parser.parse_args()
    write(options.dense, options.out, options.seed)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
