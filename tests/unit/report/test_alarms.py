"""What goes wrong quietly is said, once, on the third step; what a healthy run shows is not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from rlflow.report.alarms import Watch
from rlflow.report.metrics import Metric

HEALTHY = {"train/reward": 0.4, "train/advantage_zero": 0.5, "train/entropy": 0.8, "train/logprob_gap": 1e-6,
           "rollout/turns": 2.0, "rollout/responses_cut": 0.3, "rollout/aborted": 0.0}  # fmt: skip
REGISTERED = {
    "exact_match": Metric("share", "of tasks", score=True),
    "unfounded": Metric(
        "share", "of answers without evidence", alarm=0.2, advice="Ask for evidence."
    ),
    "tool/empty": Metric("per call", "empty answers", alarm=0.5),
}


def told(
    steps: Iterable[dict[str, float]], registered: dict[str, Metric] = REGISTERED
) -> list[list[str]]:
    watch = Watch(registered)
    return [
        [fault.text for fault in watch.observe(at, {**HEALTHY, **step})]
        for at, step in enumerate(steps)
    ]


def test_a_healthy_run_is_warned_of_nothing() -> None:
    certain = [{"train/entropy": 0.8 * 0.8**step, "train/reward": step / 50} for step in range(50)]
    assert not any(told(certain))


@pytest.mark.parametrize(
    ("sign", "words"),
    [
        (
            {"train/advantage_zero": 1.0},
            "No group differed in reward for 3 steps (mean reward 0.40)",
        ),
        (
            {"rollout/responses_cut": 2.0},
            "All responses are cut, for 3 steps: no stop string matched",
        ),
        (
            {"train/logprob_gap": 0.3},
            "Engine and trainer drift apart: their log-probs of the same tokens differ by 0.3 nats",
        ),
        (
            {"train/expert_spread": 0.01, "train/routes_differ": 0.0},
            "A router has collapsed: in some layer nearly all tokens go to the same experts, for 3 steps",
        ),
        (
            {"sync/adapters_arrived": 0.24},
            "Of what the adapters add to the weights, 24% is in those of the engines, for 3 steps",
        ),
        ({"rollout/aborted": 0.1}, "Tool errors rise: 10% of the episodes of a step are lost"),
        (
            {"rollout/unfounded": 0.25},
            "Unfounded 25% (of answers without evidence), for 3 steps. Ask for evidence.",
        ),
        ({"tool/empty": 0.75}, "Empty 0.75 per call (empty answers), for 3 steps."),
    ],
)
def test_a_sign_that_lasts_three_steps_is_told_once(sign: dict[str, float], words: str) -> None:
    found = told([{}, {}, {}, sign, sign, {}, sign, sign, sign, sign, sign])
    assert [len(texts) for texts in found] == [0] * 8 + [1, 0, 0]
    assert words in found[8][0]


@pytest.mark.parametrize(
    ("alike", "words"), [(0.95, "The attempts of 5% of"), (0.75, ""), (1.0, "")]
)
def test_a_first_step_in_which_few_groups_differ_says_so_once(alike: float, words: str) -> None:
    found = told([{"train/advantage_zero": alike}, {"train/advantage_zero": 0.95}])
    assert [len(texts) for texts in found] == [len(words) > 0, 0]
    assert not words or words in found[0][0]


def test_a_metric_that_the_environment_does_not_declare_is_told_once() -> None:
    """A misspelt score is none: the progress shows nothing, and nothing else says why."""
    step = {
        "rollout/exact_mach": 0.5,
        "rollout/unfounded": 0.1,
        "train/exact_match": 0.5,
        "tool/slow": 1.0,
    }
    found = told([step, step, {**step, "rollout/tools": 2.0}])
    expected = "Metric 'exact_mach' is not declared by the environment; declared: exact_match, unfounded. Did you mean 'exact_mat"
    assert [len(texts) for texts in found] == [1, 0, 1] and found[0][0].startswith(expected)
    assert not any(told([step], registered={}))  # nothing is declared: nothing can be misspelt


def test_a_gap_with_experts_names_router_replay_where_it_is_not_on() -> None:
    sign = {"train/logprob_gap": 0.05, "train/expert_spread": 0.8}
    words = "Engine and trainer differ by 0.05 nats per token in a model with experts, each with routes of its own"
    assert any(words in text for text in told([sign] * 3)[2])
    assert not told([{**sign, "train/routes_differ": 0.01}] * 3)[2]
    assert not told([{**sign, "rollout/staleness": 1.0}] * 3)[2]


@pytest.mark.parametrize(
    ("reward", "exact_match", "words"),
    [
        (1.0, None, "Every task is solved, for 3 steps"),
        (0.7, 1.0, "Every task is solved, for 3 steps"),  # a format penalty, the same for all
        (0.0, None, "No task is solved"),
        (0.1, 0.0, "No task is solved"),
        (0.5, 0.5, "Each task ends the same way"),
        (3.0, None, "Each task ends the same way"),
    ],
)
def test_groups_without_difference_are_all_right_all_wrong_or_mixed(
    reward: float, exact_match: float | None, words: str
) -> None:
    step = {"train/advantage_zero": 1.0, "train/reward": reward}
    found = told([step if exact_match is None else {**step, "train/exact_match": exact_match}] * 4)
    assert [len(texts) for texts in found] == [0, 0, 1, 0] and words in found[2][0]


def test_the_first_level_of_a_game_is_no_full_score() -> None:
    depth = {"depth": Metric("levels", "reached", score=True)}
    step = {"train/advantage_zero": 1.0, "train/reward": 0.0, "train/depth": 1.0}
    assert "No task is solved" in told([step] * 3, registered=depth)[2][0]


def test_the_entropy_of_five_steps_ago_counts() -> None:
    falling = [{"train/entropy": value} for value in (1.0, 1.0, 0.6, 0.4, 0.2, 0.15, 0.09, 0.05)]
    found = told(falling)
    assert [len(texts) for texts in found] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert "fell by 91% in 5 steps (1.00 to 0.09 nats per token)" in found[6][0]
    assert not any(
        told([{"train/entropy": value} for value in (0.04, 0.03, 0.01, 0.001, 1e-4, 1e-5, 1e-6)])
    ), "certain before"


FALLING = (1.0, 1.0, 0.6, 0.4, 0.2, 0.15, 0.09, 0.05, 0.02)


@pytest.mark.parametrize(
    ("rewards", "alarmed"),
    [
        ((0.2, 0.2, 0.3, 0.5, 0.7, 0.9, 0.95, 1.0, 1.0), False),  # solved
        ((1.0,) * 9, False),  # at its top from the start
        ((2.0, 2.0, 3.0, 4.0, 6.0, 7.5, 8.0, 8.5, 9.0), False),  # rises, whatever its top is
        ((0.4, 0.5, 0.3, 0.5, 0.4, 0.3, 0.5, 0.4, 0.5), True),  # noise
        ((0.4, 0.5, 0.7, 0.8, 0.6, 0.3, 0.1, 0.0, 0.0), True),  # rose, and fell
        ((0.4,) * 9, True),
    ],
)
def test_an_entropy_that_falls_while_the_reward_rises_or_is_full_is_success(
    rewards: tuple[float, ...], alarmed: bool
) -> None:
    steps = [
        {"train/entropy": entropy, "train/reward": reward}
        for entropy, reward in zip(FALLING, rewards, strict=True)
    ]
    found = [text for texts in told(steps) for text in texts]
    assert any("entropy" in text for text in found) == alarmed


def test_drift_is_also_what_grows_from_a_small_gap() -> None:
    assert not any(told([{"train/logprob_gap": 0.03}] * 10)), (
        "kernels that differ from the first step on"
    )
    assert not any(told([{"train/logprob_gap": 1e-6 * 2**step} for step in range(12)])), (
        "small whatever it was"
    )
    found = told([{"train/logprob_gap": 0.002}] * 3 + [{"train/logprob_gap": 0.03}] * 3)
    assert [len(texts) for texts in found] == [0] * 5 + [1] and "0.002 in the first steps" in found[
        5
    ][0]


def test_metrics_that_a_run_does_not_have_are_no_sign() -> None:
    watch = Watch(REGISTERED)
    assert not any(watch.observe(step, {"train/nll": 1.0}) for step in range(9))


def test_an_engine_that_never_gets_weights_is_told_though_its_gap_grows_from_the_first_step_on() -> (
    None
):
    found = told([{"train/logprob_gap": gap} for gap in (1e-6, 0.02, 0.04, 0.05)])
    assert [len(texts) for texts in found] == [0, 0, 0, 1]


def test_the_gap_of_episodes_that_ran_ahead_is_their_age() -> None:
    assert not any(told([{}] * 3 + [{"train/logprob_gap": 0.2, "rollout/staleness": 1.5}] * 5))


def test_several_signs_are_several_sentences_but_what_follows_from_another_is_not_told() -> None:
    lost = {"train/advantage_zero": 1.0, "rollout/aborted": 0.1}
    assert len(told([lost] * 3)[2]) == 2
    cut = {"train/advantage_zero": 1.0, "rollout/responses_cut": 2.0, "train/reward": 0.0}
    assert [text[:22] for text in told([cut] * 3)[2]] == ["All responses are cut,"]


def test_what_a_run_was_told_can_be_told_again_from_its_records() -> None:
    records = [{"step": step, **HEALTHY, "rollout/aborted": 0.1} for step in range(1, 6)]
    assert [(fault.name, fault.step) for fault in Watch({}).recall([{"step": 0}, *records])] == [
        ("episodes are lost", 3)
    ]
    watch = Watch({})
    assert len(watch.recall(records)) == 1 and watch.observe(6, records[-1]) == [], (
        "once in a run, resumed or not"
    )
