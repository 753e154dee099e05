"""Genuine megatron-core checkpoints for the converter's tests: made, and loaded again, by real ranks over gloo.

Weights are drawn per global tensor, as megatron-core's own description of shards names and cuts it, so that every layout
of a model has the same ones. torch_dist directories are saved and loaded by megatron-core. Legacy files are written here
in Megatron-LM's form from the ranks' genuine states (megatron-core has no code for them); `fused` renames them by hand
as Transformer Engine's layers name their parameters, which cannot be built without a GPU."""

from __future__ import annotations

import argparse
import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.dist.megatron_ranks import forget_groups, join

TOKENS = torch.randint(0, 101, (2, 11), generator=torch.Generator().manual_seed(5))
ITERATION = 7
FUSED = (
    (r"(layers\.\d+)\.input_layernorm\.weight", r"\1.self_attention.linear_qkv.layer_norm_weight"),
    (r"(layers\.\d+)\.pre_mlp_layernorm\.weight", r"\1.mlp.linear_fc1.layer_norm_weight"),
)
FUSED_LATENT = (
    (r"(layers\.\d+)\.pre_mlp_layernorm\.weight", r"\1.mlp.linear_fc1.layer_norm_weight"),
    (r"self_attention\.q_layernorm\.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    (r"self_attention\.kv_layernorm\.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
)
GROUPED = ((r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"experts.\2.weight\1"),)


@dataclass
class Job:
    """What the ranks do with one model. save_to: writes it there; load_from: compares what it finds there instead.

    saved: torch_dist, torch (legacy files), or both. numbered: keys per layer instead of stacks. program: whose way to
    save is taken (program_saves.py). data: data-parallel ranks. result: where rank 0 puts logits, its parameters and
    differences."""

    config: dict[str, Any]
    result: Path
    vocab: int
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int = 0
    first_layers: int | None = None
    last_layers: int | None = None
    dtype: torch.dtype = torch.float32
    save_to: Path | None = None
    load_from: Path | None = None
    fused: bool = False
    numbered: bool = False
    args: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    program: str = ""
    data: int = 1

    @property
    def ranks(self) -> int:
        experts = self.expert * (self.expert_tensor or self.tensor)
        return max(self.tensor, experts) * self.pipeline * self.data


def launch(jobs: Sequence[Job], limit_s: float) -> None:
    """Runs the jobs, those with as many ranks together. Raises what a rank raised, or TimeoutError."""
    import torch.distributed as dist
    import torch.multiprocessing as mp

    for ranks in sorted({job.ranks for job in jobs}):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mine = [job for job in jobs if job.ranks == ranks]
        context = mp.spawn(_rank_main, args=(store.port, ranks, mine), nprocs=ranks, join=False)
        deadline = time.monotonic() + limit_s
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the ranks took longer than {limit_s:.0f} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()


def run_alone(jobs: Sequence[Job]) -> None:
    """Runs jobs of one rank in this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for job in jobs:
            run(job)
    finally:
        dist.destroy_process_group()


def _rank_main(rank: int, port: int, ranks: int, jobs: Sequence[Job]) -> None:
    import torch.distributed as dist

    join(rank, port, ranks)
    for job in jobs:
        run(job)
    dist.destroy_process_group()


def run(job: Job) -> None:
    """One job on this rank."""
    from rlflow_tools.ckpt_convert.mapping.layout import CheckpointLayout
    from rlflow_tools.ckpt_convert.oracle import model as oracle

    from rlflow.trainer.megatron.cpu import adapted

    sizes = (job.tensor, job.pipeline, job.virtual, job.expert)
    ends = {"first_layers": job.first_layers, "last_layers": job.last_layers}
    layout = CheckpointLayout(*sizes, fused=False, **ends)
    with adapted():
        oracle.initialize_ranks(layout, job.expert_tensor)
        chunks = oracle.build(job.config, layout, padded(job), job.dtype, job.expert_tensor)
        if job.load_from is not None:
            result = {"wrong": _load_and_compare(job, chunks)}
        else:
            fill(chunks, job)
            result = {"logits": oracle.logits(chunks, TOKENS, job.vocab)}
            result["weights"] = [dict(chunk.state_dict(keep_vars=False)) for chunk in chunks]
            _save(job, chunks)
        if torch.distributed.get_rank() == 0:
            torch.save(result, job.result)
        torch.distributed.barrier()
        del chunks
        forget_groups()


def padded(job: Job) -> int:
    """Rows of the embedding: Megatron-LM pads to a multiple of `make_vocab_size_divisible_by` times the ranks."""
    multiple = job.options.get("vocab_multiple", 1) * job.tensor
    return -(-job.vocab // multiple) * multiple


def shards(chunks: list[Any], job: Job) -> Iterator[Any]:
    """megatron-core's description of every parameter of this rank: key, global shape, offset, and the data itself."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    def walk(value: Any) -> Iterator[Any]:
        if isinstance(value, ShardedTensorFactory):
            yield from walk(value.build())
        elif isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, dict):
            for item in value.values():
                yield from walk(item)
        elif isinstance(value, list):
            for item in value:
                yield from walk(item)

    for chunk in chunks:
        yield from walk(sharded(chunk, job))


def sharded(chunk: Any, job: Job) -> Any:
    from megatron.core.parallel_state import get_data_parallel_group

    metadata = {
        "non_homogeneous_layers": job.numbered,
        "dp_cp_group": get_data_parallel_group(with_context_parallel=True),
    }
    return chunk.sharded_state_dict(metadata={**metadata, **job.options.get("metadata", {})})


def expected(shard: Any, vocab: int) -> Tensor:
    """The weights of a shard: a function of the tensor's key and the place in it, whatever the layout and the stacking."""
    numbers = re.findall(r"layers\.(\d+)\.", shard.key)
    key = re.sub(r"layers\.\d+\.", "layers.", shard.key)
    expert = re.findall(r"experts\.experts\.(\d+)\.", key)
    key = re.sub(r"experts\.experts\.\d+\.", "experts.experts.", key)
    lead = [int(number) for number in (*numbers, *expert)]
    lead += list(shard.global_offset[: shard.prepend_axis_num])
    shape, offset = (
        list(shard.global_shape[shard.prepend_axis_num :]),
        list(shard.global_offset[shard.prepend_axis_num :]),
    )
    if key.endswith(("_w", "_v")):  # the halves of fc1, kept apart
        offset[0] += shape[0] if key.endswith("_v") else 0
        shape[0] *= 2
        key = key[:-2]
    seed = int.from_bytes(hashlib.sha256(f"{key} {lead}".encode()).digest()[:7], "big")
    whole = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if "norm" in key:
        whole += 1
    part = whole[tuple(slice(at, at + size) for at, size in zip(offset, shard.local_shape))]
    return part.to(shard.data.dtype)


@torch.no_grad()
def fill(chunks: list[Any], job: Job) -> None:
    """Gives every parameter its weights."""
    for shard in shards(chunks, job):
        shard.data.copy_(expected(shard, job.vocab).view(shard.data.shape))


def _save(job: Job, chunks: list[Any]) -> None:
    from megatron.core import dist_checkpointing

    if job.save_to is None:
        return
    if job.program:
        from tests.dist import program_saves

        program_saves.save(job, chunks)
        return
    content = {f"model{number}": sharded(chunk, job) for number, chunk in enumerate(chunks)}
    place = job.save_to / "torch_dist" / f"iter_{ITERATION:07d}"
    if torch.distributed.get_rank() == 0:
        place.mkdir(parents=True)
        (place.parent / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    torch.distributed.barrier()
    common = {"args": _arguments(job, chunks), "iteration": ITERATION, "checkpoint_version": 3.0}
    dist_checkpointing.save({**content, **(common if job.args else {})}, str(place))
    _save_legacy(job, chunks)


def _save_legacy(job: Job, chunks: list[Any]) -> None:
    """This rank's file, in the form of Megatron-LM's save_checkpoint."""
    from megatron.core import parallel_state as state

    if state.get_expert_data_parallel_rank() != 0:
        return
    directory = rank_directory(job)
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    content = {name: renamed_state(chunk, job) for name, chunk in zip(names, chunks)}
    if job.args:
        content["args"] = _arguments(job, chunks)
    content |= {
        "iteration": ITERATION,
        "checkpoint_version": 3.0,
        "num_floating_point_operations_so_far": 0.0,
    }
    content["rng_state"] = [
        {"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.get_rng_state()}
    ]
    content["optimizer"] = {
        "state": {0: {"exp_avg": torch.ones(3)}},
        "param_groups": [{"lr": 1e-3, "params": [0]}],
    }
    file = job.save_to / "torch" / f"iter_{ITERATION:07d}" / directory / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save(content, file)
    (file.parents[2] / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def rank_directory(job: Job) -> str:
    """The name of this rank's folder in a legacy checkpoint."""
    from megatron.core import parallel_state as state

    name = f"mp_rank_{state.get_tensor_model_parallel_rank():02d}"
    if job.pipeline > 1:
        name += f"_{state.get_pipeline_model_parallel_rank():03d}"
    if job.expert > 1:
        name += f"_{state.get_expert_model_parallel_rank():03d}"
    return name


def renamed_state(chunk: Any, job: Job) -> dict[str, Any]:
    """The module's state as Megatron-LM saves it, with Transformer Engine's names if asked for."""
    found = chunk.state_dict_for_save_checkpoint()
    if not job.fused:
        return found
    latent = "kv_lora_rank" in job.config
    renamed = type(found)()
    for name, value in found.items():
        for pattern, fused in (*(FUSED_LATENT if latent else FUSED), *GROUPED):
            layer = re.search(r"layers\.\d+\.", name)
            sparse = layer and any(
                other.startswith(f"decoder.{layer[0]}mlp.router") for other in found
            )
            if not (
                "pre_mlp" in pattern and sparse
            ):  # a router comes between that norm and the experts
                name = re.sub(pattern, fused, name)
        renamed[name] = value
    if job.tensor > 1 and latent:
        raise ValueError(
            "down projections are whole on every rank of Transformer Engine; not written by hand"
        )
    return renamed


def _arguments(job: Job, chunks: list[Any]) -> argparse.Namespace:
    """Some of the arguments that Megatron-LM keeps."""
    names = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "kv_channels",
        "ffn_hidden_size",
        "num_query_groups",
    )
    values = {name: getattr(chunks[0].config, name) for name in names}
    return argparse.Namespace(
        **values,
        group_query_attention=True,
        tensor_model_parallel_size=job.tensor,
        pipeline_model_parallel_size=job.pipeline,
        virtual_pipeline_model_parallel_size=job.virtual if job.virtual > 1 else None,
        expert_model_parallel_size=job.expert,
        expert_tensor_parallel_size=job.expert_tensor or job.tensor,
        params_dtype=job.dtype,
        bf16=job.dtype is torch.bfloat16,
        padded_vocab_size=padded(job),
        layernorm_epsilon=chunks[0].config.layernorm_epsilon,
        rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
    )


def _load_and_compare(job: Job, chunks: list[Any]) -> list[str]:
    """Loads a converted checkpoint; returns the keys of all ranks whose data are not what `expected` says."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    content = {f"model{number}": sharded(chunk, job) for number, chunk in enumerate(chunks)}
    strict = StrictHandling.RETURN_ALL
    loaded, unused, lacking = dist_checkpointing.load(content, str(job.load_from), strict=strict)
    assert not lacking, f"Megatron asks for {sorted(lacking)[:4]}"
    weights = [key for key in unused if "_extra_state" not in key]
    assert not weights, f"Megatron does not ask for {weights[:4]}"
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    wrong = []
    for shard in shards(chunks, job):
        want = expected(shard, job.vocab).view(shard.data.shape)
        if "word_embeddings" in shard.key or "output_layer" in shard.key:
            real = max(0, min(job.vocab - shard.global_offset[0], len(want)))
            if shard.data[real:].any():
                wrong.append(f"{shard.key}: padding is not zero")
            want, found = want[:real], shard.data[:real]
        else:
            found = shard.data
        if not torch.equal(want, found):
            wrong.append(shard.key)
    everywhere: list[Any] = [None] * job.ranks
    torch.distributed.all_gather_object(everywhere, wrong)
    return [name for names in everywhere for name in names]
