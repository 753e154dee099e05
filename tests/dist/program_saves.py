"""Saves with the folders, the steps and the objects of RLinf, slime, verl and NeMo-RL.

Their own code needs GPUs. What they call to write is megatron-core's (and, for RLinf's legacy files, torch.save in
Megatron-LM's form), and is called here with what they hand to it: model, optimizer, scheduler, states of generators,
and their argument objects."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.dist.checkpoint_ranks import (
    ITERATION,
    Job,
    padded,
    rank_directory,
    renamed_state,
    sharded,
)

STEP = 57
"""NeMo-RL counts its own steps; megatron's iteration stays 0."""


@dataclass
class EvalDataset:
    """As slime keeps what it evaluates on (slime/utils/eval_config.py)."""

    name: str
    path: str
    temperature: float | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)


def save(job: Job, chunks: list[Any]) -> None:
    """Saves as `job.program` does. A collective."""
    {"rlinf": _rlinf, "slime": _slime, "verl": _verl, "nemo_rl": _nemo_rl}[job.program](job, chunks)
    dist.barrier()


def folder(job: Job) -> Path:
    """What a user points at."""
    assert job.save_to is not None
    return job.save_to / job.program


def _rlinf(job: Job, chunks: list[Any]) -> None:
    """Megatron-LM's save_checkpoint with `ckpt_format: torch`: a file per rank, arguments of OmegaConf."""
    from megatron.core import parallel_state as state
    from omegaconf import OmegaConf

    optimizer = _optimizer(chunks)
    place = folder(job) / f"checkpoints/global_step_{ITERATION}/actor/iter_{ITERATION:07d}"
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    content = {
        "args": OmegaConf.create(_omegaconf_arguments(job, chunks)),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        **{name: renamed_state(chunk, job) for name, chunk in zip(names, chunks)},
        "optimizer": optimizer.state_dict(),
        "opt_param_scheduler": _scheduler(),
        "rng_state": [_generators()],
        "num_floating_point_operations_so_far": 0,
    }
    directory = place / rank_directory(job)
    if state.get_expert_data_parallel_rank() == 0:
        directory.mkdir(parents=True)
        torch.save(content, directory / "model_optim_rng.pt")
        torch.save(optimizer.state_dict(), directory / "distrib_optim.pt")
    _on_first_rank(lambda: (place.parent / "latest_checkpointed_iteration.txt").write_text("7"))


def _slime(job: Job, chunks: list[Any]) -> None:
    """Megatron-LM's save_checkpoint with torch_dist; arguments of Megatron-LM, and slime's own among them."""
    place = folder(job) / f"iter_{ITERATION:07d}"
    _save_sharded(
        job, chunks, place, {"args": _megatron_arguments(job, chunks), **_megatron_lm(ITERATION)}
    )
    (folder(job) / "rollout").mkdir(exist_ok=True)
    _on_first_rank(lambda: (folder(job) / "latest_checkpointed_iteration.txt").write_text("7"))


def _verl(job: Job, chunks: list[Any]) -> None:
    """Its MegatronCheckpointManager: no arguments, a scheduler under another name."""
    actor = folder(job) / "global_step_8" / "actor"
    _save_sharded(job, chunks, actor / "dist_ckpt", {"lr_scheduler": _scheduler()})

    def beside() -> None:
        (actor / "huggingface").mkdir()
        (actor / "huggingface" / "config.json").write_text(json.dumps(job.config))
        (actor / "transformer_config.json").write_text("{}")
        torch.save({"sampler": random.Random(0).getstate()}, actor.parent / "data.pt")
        (folder(job) / "latest_checkpointed_iteration.txt").write_text("8")

    _on_first_rank(beside)


def _nemo_rl(job: Job, chunks: list[Any]) -> None:
    """Megatron-Bridge's save_checkpoint, at iteration 0 within a step's folder."""
    step = folder(job) / f"step_{STEP}"
    weights = step / "policy" / "weights"
    _save_sharded(job, chunks, weights / "iter_0000000", _megatron_lm(0))

    def beside() -> None:
        state = {"step": torch.tensor(0), "consumed_train_samples": torch.tensor(0)}
        for file in (
            weights / "iter_0000000" / "train_state.pt",
            weights / "latest_train_state.pt",
        ):
            torch.save(state, file)
        (weights / "iter_0000000" / "run_config.yaml").write_text("model: {num_layers: 4}\n")
        (weights / "latest_checkpointed_iteration.txt").write_text("0")
        (step / "training_info.json").write_text(json.dumps({"step": STEP}))

    _on_first_rank(beside)


def _on_first_rank(action: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        action()


def _save_sharded(job: Job, chunks: list[Any], place: Path, common: dict[str, Any]) -> None:
    """By megatron-core's own strategy, in parallel over data-parallel ranks as all three ask for."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    optimizer = _optimizer(chunks)
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    content: dict[str, Any] = {name: sharded(chunk, job) for name, chunk in zip(names, chunks)}
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    content["optimizer"] = optimizer.sharded_state_dict(dict(content), metadata=metadata)
    content["rng_state"] = ShardedObject(
        "rng_state",
        [_generators()],
        (
            state.get_pipeline_model_parallel_world_size(),
            state.get_tensor_model_parallel_world_size(),
        ),
        (state.get_pipeline_model_parallel_rank(), state.get_tensor_model_parallel_rank()),
        replica_id=state.get_data_parallel_rank(with_context_parallel=True),
    )
    _on_first_rank(functools.partial(place.mkdir, parents=True))
    dist.barrier()
    group = state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1), group
    )
    dist_checkpointing.save({**content, **common}, str(place), strategy, content_metadata=metadata)


def _optimizer(chunks: list[Any]) -> Any:
    """Megatron's distributed optimizer of the chunks, after a step that moved no weight."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    model = [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, model, use_gloo_process_groups=False)
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.main_grad.normal_()
    optimizer.step()
    return optimizer


def _scheduler() -> dict[str, Any]:
    """The state of Megatron's OptimizerParamScheduler."""
    return {"max_lr": 1e-6, "lr_decay_style": "constant", "num_steps": 448, "start_wd": 0.1}


def _megatron_lm(iteration: int) -> dict[str, Any]:
    """What Megatron-LM and Megatron-Bridge put beside the sharded states."""
    return {
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "opt_param_scheduler": _scheduler(),
        "num_floating_point_operations_so_far": 0,
        "rerun_state_machine": {"mode": "disabled", "sharded": {}},
    }


def _generators() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.RandomState(0).get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _sizes(job: Job, chunks: list[Any]) -> dict[str, Any]:
    """Arguments that both kinds have."""
    config = chunks[0].config
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "kv_channels": config.kv_channels,
        "ffn_hidden_size": job.config["intermediate_size"],
        "rotary_base": 10000,
        "qk_layernorm": config.qk_layernorm,
        "tensor_model_parallel_size": job.tensor,
        "pipeline_model_parallel_size": job.pipeline,
        "virtual_pipeline_model_parallel_size": job.virtual if job.virtual > 1 else None,
        "expert_model_parallel_size": job.expert,
        "expert_tensor_parallel_size": job.expert_tensor or job.tensor,
        "context_parallel_size": 1,
        "num_experts": config.num_moe_experts,
        "moe_router_topk": config.moe_router_topk,
        "padded_vocab_size": padded(job),
        "position_embedding_type": "rope",
        "swiglu": True,
        "seq_length": 4096,
        "iteration": 0,
        "consumed_train_samples": 0,
    }


def _megatron_arguments(job: Job, chunks: list[Any]) -> argparse.Namespace:
    """Megatron-LM's namespace, with objects that it and slime keep there."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        **_sizes(job, chunks),
        group_query_attention=True,
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        rotary_percent=1.0,
        vocab_size=job.vocab,
        untie_embeddings_and_output_weights=not job.config["tie_word_embeddings"],
        params_dtype=torch.bfloat16,
        bf16=True,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        data_parallel_size=dist.get_world_size() // (job.tensor * job.pipeline),
        attention_backend=AttnBackend.auto,
        model_type=ModelType.encoder_or_decoder,
        exit_signal=signal.SIGTERM,
        distributed_timeout=datetime.timedelta(minutes=10),
        activation=F.silu,
        optimizer_class=torch.optim.AdamW,
        custom_generate=functools.partial(sorted, reverse=True),
        stop_tokens={1, 2},
        save=Path("/somewhere"),
        eval_datasets=[EvalDataset("aime", "/data/aime.jsonl", metadata_overrides={"n": 1})],
    )


def _omegaconf_arguments(job: Job, chunks: list[Any]) -> dict[str, Any]:
    """RLinf's: Megatron-LM's defaults (flags and numbers), with what its YAML and the model's config.json say on top."""
    defaults = {
        "group_query_attention": False,
        "norm_epsilon": 1e-5,
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "rotary_interleaved": False,
        "apply_layernorm_1p": False,
        "quick_geglu": False,
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": False,
        "vocab_size": None,
        "window_size": None,
        "softmax_scale": None,
        "use_tp_pp_dp_mapping": False,
        "rank": 0,
        "world_size": 1,
    }
    return {
        **defaults,
        **_sizes(job, chunks),
        "layernorm_epsilon": 1e-6,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "share_embeddings_and_output_weights": job.config["tie_word_embeddings"],
        "params_dtype": "${torch.dtype:bfloat16}",
        "mcore_customization_config": {},
    }
