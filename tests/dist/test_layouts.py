"""Every layout computes what one process and transformers compute; four real ranks over gloo.

A case is a model and words, e.g. "qwen2-tied TP2 PP2 SP packed": what of the four ranks is left is data parallel.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_model
from torch import Tensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from rlflow.batching import ROUTED, ROUTES
from rlflow.models.huggingface import digest, iterate_weights
from rlflow.trainer.base import Trainer
from rlflow.types import Batch
from tests import rounding
from tests.dist import critic_ranks, lora_ranks
from tests.dist.megatron_ranks import (
    OPTIONS,
    UPDATES,
    PolicyGradientWithEntropy,
    Ranks,
    make_batch,
    train,
)

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(1000),
]  # the ranks of all cases start with the first test

VOCAB = 301  # odd, so that every split pads it
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"family": "qwen2", "tied": True},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "llama": {"family": "llama"},
    "qwen3_moe": {"family": "qwen3_moe"},
    "mixtral": {"family": "mixtral", "tied": True},
    "glm4_moe": {"family": "glm4_moe"},
    "gemma3_text": {"family": "gemma3_text", "tied": True},
    "deepseek_v3": {"family": "deepseek_v3"},
    # With a scale of 0.15 its logits in float32 are 1.4e-5 from those in double precision, transformers' too.
    "deep": {"family": "qwen2", "tied": True, "num_hidden_layers": 8, "scale": 0.1},
}
SHORT = ("qwen2-tied", "qwen3", "qwen3_moe", "glm4_moe", "gemma3_text")
MODELS |= {f"{name}-short": {**MODELS[name], "num_hidden_layers": 2} for name in SHORT}
SIZES = {
    "TP": "tensor_parallel",
    "PP": "pipeline_parallel",
    "CP": "context_parallel",
    "VPP": "virtual_pipeline",
    "EP": "expert_parallel",
}
WORDS: dict[str, dict[str, Any]] = {
    "SP": {"sequence_parallel": True},
    "DO": {"distributed_optimizer": True},
    "packed": {"packing": True},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "chunked": {
        "logits_chunk_mib": 0.01
    },  # 17 positions of two ranks' vocabulary: several chunks per micro-batch
    "bf16": {"dtype": "bfloat16"},
    "replayed": {"router_replay": "rollout"},  # and a batch that names random experts
    "recorded": {
        "router_replay": "recompute"
    },  # others than the first weights choose, in all updates
    "losses": {"balance": {"aux_loss": 0.1, "z_loss": 0.01}},  # of the routers
    "balanced": {
        "balance": {"aux_loss": 0.1, "z_loss": 0.01, "bias_rate": 0.003}
    },  # and biases that move
    # Other batches:
    "few": {},  # fewer rows than data-parallel ranks, or than micro-batches in the pipeline: some are dummies
    "observed": {},  # the last token of every row is an observation, not trained
    "changed": {},  # and another one
}
ONE_PROCESS = ("replayed", "recorded", "losses", "balanced")
"""Words that one process obeys too."""
FAST = [
    "qwen2-tied",
    "qwen2-tied TP2 PP2 VPP2",
    "qwen3-short TP2 CP2 SP DO packed chunked full",
    "llama PP2 VPP2 CP2 DO selective",
    "qwen3_moe-short TP2 PP2 SP EP2 packed",
    "gemma3_text-short TP2 PP2 SP packed",
]
"""Each of the sizes and of the trainer's options in float32, with several others; more combinations are in SLOW."""
FEW_ROWS = ["qwen2-tied few", "qwen2-tied PP2 VPP2 few"]
CONTINUED = ["qwen2-tied TP2 PP2 VPP2", "qwen3_moe-short TP2 PP2 SP EP2 packed"]
"""Their checkpoints continue in one process, and they from one of its. With a split optimizer: test_resume_layouts."""
ROUNDED = ["qwen2-tied TP2 CP2 SP DO packed bf16"]
ROUNDED_SLOW = ["qwen2-tied TP2 PP2 SP bf16", "qwen2-tied PP2 VPP2 CP2 DO packed bf16"]
RECORDED = ["glm4_moe-short TP2 PP2 SP EP2 packed recorded balanced full"]
ROUTED_SLOW = [
    "glm4_moe CP2 EP4 recorded balanced",
    "qwen3_moe TP2 PP2 SP EP2 packed replayed full",
    "qwen3_moe CP2 EP4 replayed",
    "qwen3_moe PP2 VPP2 CP2 recorded selective",
    "qwen3_moe EP4 losses few",
    *(f"{model} {layout} balanced" for model in ("glm4_moe", "deepseek_v3")
      for layout in ("EP4 DO", "TP2 PP2 SP EP2 packed full", "CP2 EP2 selective", "PP2 VPP2 EP2", "TP2 CP2 SP EP4 packed")),
]  # fmt: skip
"""Routes named or recorded, losses of routers, biases that move."""
OBSERVATIONS = "qwen2-tied-short PP2 CP2 packed"
CRITIC = "qwen2-tied-short TP2 PP2 SP packed"
"""Others are in test_critic."""
LORA = ["qwen2-tied-short TP2 PP2 SP packed full"]
"""Others are in test_lora."""
TWO = ("TP2 PP2", "TP2 CP2", "PP2 CP2", "PP2 VPP2", "TP2 PP2 VPP2", "PP2 VPP2 CP2")
SLOW = [
    "qwen3 packed",
    *("qwen2-tied TP2 PP2 packed chunked", "qwen3 TP2 SP packed chunked", "qwen2 TP2 PP2 SP full"),
    *("qwen3 TP2 CP2 SP DO packed chunked full", "mixtral EP2 DO"),
    *(f"{model} {layout}".strip() for model in list(MODELS)[:4] for layout in ("TP2 PP2", "TP2", "PP2", "PP4", "")),
    *(
        f"{model} {layout} {words}".replace("  ", " ")
        for model, options, layouts in (
            ("qwen2-tied", ("", "packed full", "DO"), ("", "TP2", "PP2", "CP2", "CP4", "PP4", *TWO)),
            ("qwen3", ("packed", "selective DO"), TWO),
        )
        for layout in layouts
        for words in (*options, *(("SP", "SP packed DO full") if "TP" in layout else ()))
    ),
    *(
        f"{model} {layout}"
        for model in ("qwen3_moe", "mixtral")
        for layout in ("", "EP2", "EP4 DO", "TP2 SP", "TP2 SP EP2 selective", "PP2 EP2 full", "PP2 DO packed",
                       "CP2 EP2 packed", "TP2 CP2 SP EP4 DO", "PP2 VPP2 EP2", "EP4 few")
    ),
    *(
        f"{model} {layout} packed"
        for model in ("glm4_moe", "deepseek_v3")
        for layout in ("", "EP4 DO", "TP2 SP EP2 selective", "TP2 PP2 SP EP2", "CP2 EP2 full", "PP2 CP2 EP2 DO",
                       "TP2 CP2 SP EP4", "PP2 VPP2 EP2", "CP4")
    ),
    *(
        f"gemma3_text {layout}".strip()
        for layout in ("", "TP2", "PP2 VPP2", "CP2 packed", "TP2 PP2 SP DO", "TP2 CP2 SP packed full", "PP4 selective")
    ),
    *(f"deep {layout}" for layout in ("PP4 VPP2", "PP2 VPP4", "PP4 VPP2 few", "PP2 VPP4 packed DO full")),
]  # fmt: skip
SLOW = sorted({case.strip() for case in SLOW} - set(FAST))


def options_of(case: str) -> dict[str, Any]:
    """The trainer's keywords that the words of a case mean."""
    options: dict[str, Any] = {}
    for word in case.split()[1:]:
        size = re.fullmatch(r"(TP|PP|CP|VPP|EP)(\d)", word)
        options |= {SIZES[size[1]]: int(size[2])} if size else WORDS[word]
    return options


def batch_of(case: str) -> Batch:
    words = case.split()
    batch = make_batch(VOCAB, rows=3 if "few" in words else 11)
    if "replayed" in words:
        draw = torch.Generator().manual_seed(0)
        experts = torch.rand(*batch.tokens.shape, 4, 4, generator=draw).argsort(-1)[..., :2]
        return batch.replace(extras={ROUTES: experts.to(torch.uint8), ROUTED: batch.lengths - 1})
    if not {"observed", "changed"} & set(words):
        return batch
    rows, last = torch.arange(len(batch)), batch.lengths - 1
    mask, weights, tokens = batch.loss_mask.clone(), batch.weights.clone(), batch.tokens.clone()
    mask[rows, last], weights[rows, last] = False, 0.0
    if "changed" in words:
        tokens[rows, last] = (tokens[rows, last] + 1 + rows) % VOCAB
    return batch.replace(tokens=tokens, loss_mask=mask, weights=weights)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts")
    for name, options in MODELS.items():
        sizes = {"num_hidden_layers": 4, "scale": 0.15, **options}
        tiny_model(path / name, tokenizer=False, vocab_size=VOCAB, **sizes)
    return path


class Alone(dict[str, dict[str, Any]]):
    """What one process gives in float32, of each case or model that is asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __missing__(self, case: str) -> dict[str, Any]:
        model, *words = case.split()
        keywords = {
            key: value
            for word in words
            if word in ONE_PROCESS
            for key, value in WORDS[word].items()
        }
        saved = None if words else self._directory / f"checkpoint-{model}"
        self[case] = train(self._directory / model, batch_of(case), options=keywords, save_to=saved)
        return self[case]

    def of(self, case: str) -> dict[str, Any]:
        """That of all cases of its model and of its words that are no layout."""
        model, *words = case.split()
        return self[" ".join([model, *(word for word in words if word in (*ONE_PROCESS, "few"))])]


@pytest.fixture(scope="module")
def single(directory: Path) -> Alone:
    return Alone(directory)


def run(
    ranks: Ranks,
    directory: Path,
    single: Alone,
    cases: Iterable[str],
    limit_s: float,
    others: Iterable[dict[str, Any]] = (),
) -> dict[str, dict[str, Any]]:
    """What one launch of the ranks gives for each case; other jobs go with them."""
    for model in {case.split()[0] for case in cases if case in (*CONTINUED, *SLOW)}:
        single[model]  # writes the checkpoint that they load
    jobs = {case: make_job(directory, case) for case in cases}
    ranks.run(directory, [*jobs.values(), *others], limit_s)
    return {case: torch.load(job["result"], weights_only=False) for case, job in jobs.items()}


def make_job(directory: Path, case: str) -> dict[str, Any]:
    model, place = case.split()[0], case.replace(" ", "-")
    return {
        "model": directory / model,
        "batch": batch_of(case),
        "options": options_of(case),
        "save_to": directory / f"ranks-{place}" if case in (*CONTINUED, *SLOW) else None,
        "load_from": directory / f"checkpoint-{model}" if case in (*CONTINUED, *SLOW) else None,
        "result": directory / f"{place}.pt",
    }


@pytest.fixture(scope="module")
def critic(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ranks' job, and what one process gives."""
    model = CRITIC.split()[0]
    expected = critic_ranks.train_alone(directory, model)
    return critic_ranks.make_job(directory, model, CRITIC, options_of(CRITIC)), expected


@pytest.fixture(scope="module")
def lora(
    directory: Path,
) -> tuple[dict[str, dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]:
    """The ranks' jobs by case; what one process gives, and LoRA written out in torch."""
    model = LORA[0].split()[0]
    expected = lora_ranks.train_alone(directory, model)
    return {
        case: lora_ranks.make_job(directory, model, case, options_of(case)) for case in LORA
    }, expected


@pytest.fixture(scope="module")
def fast(
    ranks: Ranks, directory: Path, single: Any, critic: Any, lora: Any
) -> dict[str, dict[str, Any]]:
    observations = [f"{OBSERVATIONS} {word}" for word in ("observed", "changed")]
    cases = [*FAST, *FEW_ROWS, *ROUNDED, *RECORDED, *observations]
    return run(ranks, directory, single, cases, limit_s=900, others=[critic[0], *lora[0].values()])


class Launched(dict[str, dict[str, Any]]):
    """What the ranks give for slow cases: one launch for all of a model, when the first of them is asked for."""

    def __init__(self, ranks: Ranks, directory: Path, single: Alone) -> None:
        self._ranks, self._directory, self._single = ranks, directory, single
        self._begun: set[str] = set()

    def __missing__(self, case: str) -> dict[str, Any]:
        model = case.split()[0]
        assert model not in self._begun, f"the launch of {model} failed"
        self._begun.add(model)
        cases = [one for one in (*SLOW, *ROUNDED_SLOW, *ROUTED_SLOW) if one.split()[0] == model]
        self.update(run(self._ranks, self._directory, self._single, cases, limit_s=900))
        return self[case]


@pytest.fixture(scope="module")
def slow(ranks: Ranks, directory: Path, single: Alone) -> Launched:
    return Launched(ranks, directory, single)


def transformers_logits(path: Path, batch: Batch) -> Tensor:
    """The oracle: (B, T, V) from an implementation that shares nothing with ours."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(batch.tokens).logits


def described(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Log-prob of each token and entropy of its distribution, (B, T), from logits."""
    logprobs = (logits[:, :-1] / batch.temperatures[:, None, None]).log_softmax(-1)
    valid = torch.arange(1, batch.tokens.shape[1]) < batch.lengths[:, None]
    scores = {
        "logprobs": logprobs.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1),
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
    }
    return {name: torch.nn.functional.pad(value * valid, (1, 0)) for name, value in scores.items()}


def real(batch: Batch) -> Tensor:
    return torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]


def check(case: str, result: dict[str, Any], expected: dict[str, Any], directory: Path) -> None:
    """The claims of this file about one case, in float32."""
    model, batch = directory / case.split()[0], batch_of(case)
    logits, valid = transformers_logits(model, batch), real(batch)
    _, bound = rounding.logits(model, rounding.rows_of(batch))  # of each side
    torch.testing.assert_close(result["logits"][valid], logits[valid], atol=2 * bound, rtol=0)
    for quantity, values in described(logits, batch).items():
        torch.testing.assert_close(
            result["score"][quantity], values, atol=2 * score_bound(case, directory), rtol=0
        )
    assert result["digest"] == digest(iterate_weights(model)), (
        "HF -> Megatron -> HF is not bit-exact"
    )
    assert result["same_on_all_ranks"]
    assert torch.equal(result["reference"], result["score"]["logprobs"]), (
        "the snapshot moved with the policy"
    )
    for got, wanted in zip(result["metrics"], expected["metrics"], strict=True):
        check_metrics(got, wanted)
    start = dict(iterate_weights(model))
    for key, weight in expected["weights"].items():
        distance = (result["weights"][key] - weight).norm()
        assert distance <= 1e-5 * weight.norm(), f"{key} differs"
        assert distance <= 1e-3 * (weight - start[key]).norm(), f"{key} was trained otherwise"


def score_bound(case: str, directory: Path) -> float:
    """How far rounding may bring a log-prob at the lowest temperature; entropies depend less on the logits."""
    batch = batch_of(case)
    return rounding.logprobs(
        directory / case.split()[0], rounding.rows_of(batch), float(batch.temperatures.min())
    )[1]


def check_metrics(got: dict[str, float], wanted: dict[str, float]) -> None:
    for metric in (
        "loss",
        "gradient_norm",
        "entropy",
        "highest_entropy",
        "tokens_seen",
        "lr",
        "tokens",
    ):
        assert got[metric] == pytest.approx(wanted[metric], rel=1e-5, abs=1e-7), metric


def check_weights(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for key, weight in wanted.items():
        assert (got[key] - weight).norm() <= 1e-5 * weight.norm(), key


def check_continues(case: str, result: dict[str, Any], directory: Path) -> None:
    """A checkpoint of the ranks, read by one process: same weights and snapshot, and the next update is the same."""
    trainer = Trainer.from_pretrained(directory / case.split()[0], **OPTIONS)
    assert trainer.load(directory / f"ranks-{case.replace(' ', '-')}") == UPDATES
    assert digest(trainer.weights()) == digest(result["weights"].items())
    batch = batch_of(case)
    found, bound = trainer.score(batch, "reference")["logprobs"], 2 * score_bound(case, directory)
    torch.testing.assert_close(found, result["reference"], atol=bound, rtol=0)
    check_metrics(trainer.update(batch, PolicyGradientWithEntropy()), result["next_metrics"])
    check_weights(dict(trainer.weights()), result["next_weights"])
    trainer.close()


def check_loaded(result: dict[str, Any], saved: dict[str, Any]) -> None:
    """A checkpoint of one process, read by the ranks."""
    assert result["loaded_digest"] == digest(saved["weights"].items())
    check_metrics(result["loaded_metrics"], saved["next_metrics"])
    check_weights(result["loaded_weights"], saved["next_weights"])


@pytest.mark.parametrize("case", FAST)
def test_layout_equals_one_process_and_transformers(
    case: str, fast: Any, single: Any, directory: Path
) -> None:
    check(case, fast[case], single[case.split()[0]], directory)


@pytest.mark.parametrize("case", CONTINUED)
def test_a_checkpoint_of_four_ranks_continues_on_one(case: str, fast: Any, directory: Path) -> None:
    check_continues(case, fast[case], directory)


@pytest.mark.parametrize("case", CONTINUED)
def test_a_checkpoint_of_one_rank_continues_on_four(case: str, fast: Any, single: Any) -> None:
    check_loaded(fast[case], single[case.split()[0]])


@pytest.mark.parametrize("case", FEW_ROWS)
def test_dummy_microbatches_change_nothing(case: str, fast: Any, directory: Path) -> None:
    check(case, fast[case], train(directory / "qwen2-tied", batch_of(case)), directory)


def test_a_critic_over_ranks_is_one_plain_critic_and_its_checkpoints_load_both_ways(
    fast: Any, critic: Any
) -> None:
    critic_ranks.check(*critic)


@pytest.mark.parametrize("case", LORA)
def test_adapters_over_ranks_are_plain_lora_and_their_checkpoints_load_both_ways(
    case: str, fast: Any, lora: Any
) -> None:
    jobs, expected = lora
    lora_ranks.check_layout(jobs[case], *expected)


def check_routed(case: str, result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Experts recorded, named ones taken, routers' losses and biases: all as in one process."""
    assert result["same_on_all_ranks"]
    if "recorded" in case:
        valid = real(batch_of(case))
        found, wanted = (side["routes"].sort(-1).values[valid] for side in (result, expected))
        assert torch.equal(found, wanted) and len(found.unique()) == 4
    for got, wanted in zip(result["metrics"], expected["metrics"], strict=True):
        check_metrics(got, wanted)
        for loss in {"router_aux_loss", "router_z_loss"} & wanted.keys():
            assert got[loss] == pytest.approx(wanted[loss], rel=1e-5), loss
    check_weights(result["weights"], expected["weights"])
    torch.testing.assert_close(result["reference"], expected["reference"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", RECORDED)
def test_experts_are_recorded_taken_and_balanced_on_all_ranks(
    case: str, fast: Any, single: Alone
) -> None:
    check_routed(case, fast[case], single.of(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUTED_SLOW)
def test_experts_are_routed_and_balanced_in_every_layout(
    case: str, slow: Any, single: Alone
) -> None:
    check_routed(case, slow[case], single.of(case))


def test_another_observation_at_the_end_of_a_row_changes_no_gradient(fast: Any) -> None:
    """Bit for bit, where rows are packed and split over context-parallel ranks and stages."""
    one, other = (fast[f"{OBSERVATIONS} {word}"] for word in ("observed", "changed"))
    assert one["metrics"] == other["metrics"]
    assert digest(one["weights"].items()) == digest(other["weights"].items())
    assert not torch.equal(one["score"]["logprobs"], other["score"]["logprobs"]), (
        "the tokens are the same"
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_every_layout_equals_one_process_and_transformers(
    case: str, slow: Any, single: Any, directory: Path
) -> None:
    name = case.split()[0]
    expected = single[name] if "few" not in case else train(directory / name, batch_of(case))
    check(case, slow[case], expected, directory)
    check_continues(case, slow[case], directory)
    if "few" not in case:
        check_loaded(slow[case], single[name])


ROUNDOFF = 2.0**-8
"""Of bfloat16: the largest relative error of one rounding."""


@pytest.fixture(scope="module")
def rounded(directory: Path) -> dict[str, Any]:
    """One process in bfloat16 with float32 master weights."""
    return train(
        directory / "qwen2-tied", batch_of("qwen2-tied"), options=options_of("qwen2-tied bf16")
    )


def check_rounded(
    result: dict[str, Any], rounded: dict[str, Any], exact: dict[str, Any], directory: Path
) -> None:
    """Against float32 in one process, in root mean square: what a layout adds to one process' rounding is below one rounding."""
    valid = real(batch_of("qwen2-tied"))

    def error(found: dict[str, Any], of: Callable[[dict[str, Any]], Tensor]) -> float:
        return ((of(found) - of(exact)).norm() / of(exact).norm()).item()

    start = dict(iterate_weights(directory / "qwen2-tied"))
    quantities: dict[str, Callable[[dict[str, Any]], Tensor]] = {
        "logits": lambda side: side["logits"][valid],
        "log-probs": lambda side: side["score"]["logprobs"],
        "losses": lambda side: torch.tensor([metrics["loss"] for metrics in side["metrics"]]),
        "gradient norms": lambda side: torch.tensor(
            [metrics["gradient_norm"] for metrics in side["metrics"]]
        ),
        "updates": lambda side: torch.cat(
            [(side["weights"][key] - start[key]).flatten() for key in sorted(start)]
        ),
    }
    found = {name: (error(result, of), error(rounded, of)) for name, of in quantities.items()}
    for name, (over_ranks, alone) in found.items():
        assert 0 < over_ranks <= 1.25 * alone + ROUNDOFF, (name, over_ranks, alone)
    assert result["same_on_all_ranks"]


@pytest.mark.parametrize("case", ROUNDED)
def test_bfloat16_is_as_exact_over_ranks_as_in_one_process(
    case: str, fast: Any, rounded: Any, single: Any, directory: Path
) -> None:
    check_rounded(fast[case], rounded, single["qwen2-tied"], directory)


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUNDED_SLOW)
def test_bfloat16_is_as_exact_in_other_layouts(
    case: str, slow: Any, rounded: Any, single: Any, directory: Path
) -> None:
    check_rounded(slow[case], rounded, single["qwen2-tied"], directory)


def _fail_on_one(rank: int, jobs: list[dict[str, Any]]) -> None:
    """One rank raises, dies or hangs, while the others wait for it."""
    import torch.distributed as dist

    how = jobs[0]["how"]
    if rank == 2 and how == "raises":
        raise ZeroDivisionError("rank 2 has gone wrong")
    if rank == 2 and how == "dies":
        os._exit(7)
    if rank == 2 and how == "hangs":
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raises", ProcessRaisedException, "ZeroDivisionError: rank 2 has gone wrong"),
        ("dies", ProcessExitedException, "process 2 terminated with exit code 7"),
        ("hangs", TimeoutError, "longer than 1 s"),
    ],
)
def test_ranks_that_fail_are_an_error_and_the_next_work_gets_others(
    how: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    ranks = Ranks()
    with pytest.raises(error, match=message):
        ranks.run(tmp_path, [{"how": how}], 1, work=_fail_on_one)
    ranks.run(tmp_path, [{"how": "none"}], 60, work=_fail_on_one)
    ranks.close()
