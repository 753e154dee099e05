"""A checkpoint by another version of megatron-core: `PYTHON core_writer.py CONFIG_JSON OUT own|object`, without rlflow.

OUT/iter_0000007 is what dist_checkpointing.save writes with its default strategy; OUT/weights.pt the model's parameters by
name. One rank, no GPU. own: arguments and iteration lie where this version puts them. object: in an object of the checkpoint, as
versions after 0.18 keep them (Megatron-LM, dist_checkpointing/serialization.py, save), and not in common.pt."""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


def without_gpu() -> None:
    """What megatron-core asks of CUDA when it builds and saves a model."""
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore
    torch.cuda.synchronize = lambda *_: None  # type: ignore
    torch.cuda.set_device = lambda *_: None  # type: ignore


def build(config: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    experts = config.get("num_experts") or config.get("num_local_experts")
    sparse = {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": config.get("moe_intermediate_size"),
        "moe_router_topk": config.get("num_experts_per_tok"),
        "moe_router_load_balancing_type": "none",
    }
    megatron = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        ffn_hidden_size=config["intermediate_size"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config["model_type"] == "qwen2",
        qk_layernorm=config["model_type"].startswith("qwen3"),
        normalization="RMSNorm",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        **(sparse if experts else {}),
    )
    known = inspect.signature(get_gpt_layer_local_spec).parameters
    options = {
        "num_experts": experts,
        "qk_layernorm": megatron.qk_layernorm,
        "normalization": "RMSNorm",
    }
    spec = get_gpt_layer_local_spec(
        **{name: value for name, value in options.items() if name in known}
    )
    tied = config["tie_word_embeddings"]
    model = GPTModel(
        megatron,
        spec,
        config["vocab_size"],
        64,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )
    return model.bfloat16()


def main(config_file: str, out: str, common: str) -> None:
    import megatron.core
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    without_gpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = json.loads(Path(config_file).read_text())
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    place = Path(out) / "iter_0000007"
    place.mkdir(parents=True)
    args = argparse.Namespace(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"]
    )
    beside = {"args": args, "iteration": 7, "checkpoint_version": 3.0}
    dist_checkpointing.save({"model": model.sharded_state_dict(), **beside}, str(place))
    if common == "object" and (place / "common.pt").exists():
        shutil.rmtree(place)
        place.mkdir()
        held = ShardedObject("common_state", beside, (1,), (0,), replica_id=0)
        dist_checkpointing.save(
            {"model": model.sharded_state_dict(), "common_state": held}, str(place)
        )
        (place / "common.pt").unlink()
    torch.save(
        {name: value.detach() for name, value in model.named_parameters()}, Path(out) / "weights.pt"
    )
    print(megatron.core.__version__)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
