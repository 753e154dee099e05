"""Random schedules, failures and deaths of asynchronous runs, on a virtual clock: the bound holds, nothing is trained
twice or lost, and all of them come to an end."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlflow.rollout.pacing import Pacing, WhenStale
from tests.unit.run.simulation import Outcome, Simulation, Workload

WORKLOADS = st.builds(
    Workload,
    seed=st.integers(0, 10**6),
    prompts=st.integers(1, 4),
    samples=st.integers(1, 3),
    tasks=st.integers(1, 30),
    sigma=st.sampled_from([0.0, 1.0, 2.0]),
    train_s=st.sampled_from([0.1, 2.0, 20.0]),
    places=st.integers(1, 12),
    failing=st.sampled_from([0.0, 0.2]),
    refused=st.sampled_from([0.0, 0.3]),
    frozen=st.booleans(),
    lost=st.sampled_from([0.0, 0.0, 0.3]),
    stuck=st.sampled_from([0.0, 0.0, 0.15]),
    group_s=st.sampled_from([None, 3.0, 70.0]),
    moves=st.booleans(),
    checkpoint_every=st.integers(1, 4),
    lives=st.lists(st.integers(0, 60), max_size=4).map(tuple),
)


@st.composite
def pacings(draw: st.DrawFn, prompts: int) -> Pacing:
    most = draw(st.integers(0, 5))
    when = draw(st.sampled_from(["wait", "drop"])) if most else "wait"
    return Pacing(prompts, most, draw(st.integers(0, most if when == "wait" else most + 2)), when)


CASES = WORKLOADS.flatmap(lambda work: st.tuples(st.just(work), pacings(work.prompts)))


def played(workload: Workload, pacing: Pacing) -> Outcome:
    return Simulation(pacing, workload).run()


def assert_kept_its_promises(workload: Workload, pacing: Pacing) -> None:
    outcome = played(workload, pacing)
    # The bound: updates between the policy in training and the one that sampled, whatever lives they belong to.
    assert outcome.worst <= pacing.max_staleness
    assert all(0 <= label <= pacing.max_staleness for label in outcome.labels)
    # Each attempt exactly once: every task is trained once, with all its attempts, or refused by the filter.
    trained = Counter(name.partition(":")[2] for _, name, _ in outcome.trained)
    assert set(trained.values()) <= {1}
    assert set(trained) | outcome.refused == {f"t{number}" for number in range(workload.tasks)}
    assert not set(trained) & outcome.refused
    for _, name, attempts in outcome.trained:
        assert attempts and list(attempts) == sorted(attempts)
        assert all(
            (name, number) in outcome.late
            for number in set(range(workload.samples)) - set(attempts)
        )
    assert not outcome.late or workload.group_s is not None
    # Steps are full as long as there are tasks.
    sizes = Counter(step for step, _, _ in outcome.trained)
    assert all(sizes[step] == workload.prompts for step in range(max(sizes, default=0)))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(CASES)
def test_no_schedule_failure_or_death_breaks_a_promise(case: tuple[Workload, Pacing]) -> None:
    assert_kept_its_promises(*case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(
    max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(CASES)
def test_no_schedule_failure_or_death_breaks_a_promise_in_two_thousand_cases(
    case: tuple[Workload, Pacing],
) -> None:
    assert_kept_its_promises(*case)


@pytest.mark.parametrize(
    "lag, ahead, when",
    [(1, 1, "wait"), (2, 1, "wait"), (4, 2, "wait"), (2, 2, "drop"), (1, 3, "drop")],
)
def test_where_times_have_a_long_tail_the_bound_is_reached_and_not_passed(
    lag: int, ahead: int, when: WhenStale
) -> None:
    work = Workload(
        seed=0, tasks=40, prompts=2, samples=2, sigma=2.0, places=32, frozen=False, failing=0.0
    )
    pacing = Pacing(work.prompts, lag, ahead, when)
    assert_kept_its_promises(work, pacing)
    assert played(work, pacing).worst == lag


def test_a_run_that_dies_trains_the_same_attempts_as_one_that_does_not() -> None:
    work = Workload(seed=3, tasks=30, failing=0.0)
    pacing = Pacing(work.prompts, 3, 2)
    calm = played(work, pacing)
    killed = played(dataclasses.replace(work, lives=(5, 21, 17, 8)), pacing)
    assert killed.deaths == 4 and calm.deaths == 0
    assert {name.partition(":")[2] for _, name, _ in killed.trained} == {
        name.partition(":")[2] for _, name, _ in calm.trained
    }


def test_running_ahead_hides_the_slowest_attempts() -> None:
    """Lognormal times with sigma 1.5: a step of the synchronous run lasts as long as its longest attempt."""
    work = Workload(
        seed=1,
        tasks=60,
        prompts=4,
        samples=2,
        sigma=1.5,
        train_s=1.0,
        places=64,
        failing=0.0,
        frozen=False,
    )
    seconds = {
        lag: played(work, Pacing(work.prompts, lag, min(lag, 2))).seconds for lag in (0, 1, 4)
    }
    assert seconds[4] < seconds[1] < seconds[0] and seconds[0] > 2 * seconds[4]


def test_staleness_sits_below_its_bound_where_run_ahead_is_less() -> None:
    work = Workload(seed=2, tasks=60, places=64, failing=0.0)
    near = played(work, Pacing(work.prompts, 4, 1))
    far = played(work, Pacing(work.prompts, 4, 4))
    assert sum(near.labels) / len(near.labels) < sum(far.labels) / len(far.labels) <= 4


def test_an_attempt_that_hangs_costs_its_group_one_attempt_and_no_step_its_time() -> None:
    work = Workload(seed=5, tasks=40, samples=4, places=64, stuck=0.05, failing=0.0, frozen=False)
    waits = played(work, Pacing(work.prompts, 2, 1))
    patient = dataclasses.replace(work, group_s=70.0)
    assert_kept_its_promises(patient, Pacing(work.prompts, 2, 1))
    closes = played(patient, Pacing(work.prompts, 2, 1))
    assert (
        closes.late and closes.short == len({name for name, _ in closes.late}) and waits.short == 0
    )
    assert closes.seconds < 0.4 * waits.seconds
    # Nobody else was given up: no attempt that does not hang takes 70 s.
    assert len(closes.late) / (work.tasks * work.samples) < 0.1


@pytest.mark.parametrize("training_s, generation_s", [(3.0, 5.0), (4.0, 5.0), (5.0, 2.0)])
def test_the_delayed_parameter_update_takes_the_longer_of_generation_and_training(
    training_s: float, generation_s: float
) -> None:
    """The arithmetic of LlamaRL and AsyncFlow: the sum in step, the maximum one step apart, one version old. Attempts take
    equally long and there is room for one batch of them, so nothing else can be gained."""
    work = Workload(tasks=60, prompts=2, samples=2, median_s=generation_s, sigma=0.0, train_s=training_s, places=4, failing=0.0,
                    frozen=False, checkpoint_every=100)  # fmt: skip
    steps = work.tasks // work.prompts
    in_step = played(work, Pacing(work.prompts))
    apart = played(work, Pacing(work.prompts, 1, 1))
    assert in_step.seconds == pytest.approx(steps * (training_s + generation_s))
    longer = max(training_s, generation_s)
    assert steps * longer <= apart.seconds <= steps * longer + training_s + generation_s
    assert set(in_step.labels) == {0} and set(apart.labels) <= {0, 1}


def test_far_enough_ahead_a_long_tail_leaves_training_alone_to_be_waited_for() -> None:
    """Lognormal times of median 2 s and sigma 1.2, training of 3 s: nine tenths of a run of 100 steps, its beginning and its last
    stragglers included, are training."""
    work = Workload(seed=4, tasks=400, prompts=4, samples=4, train_s=3.0, places=256, failing=0.0, frozen=False,
                    checkpoint_every=1000)  # fmt: skip
    outcome = played(work, Pacing(work.prompts, 16, 8))
    steps = work.tasks // work.prompts
    assert steps * work.train_s / outcome.seconds >= 0.9
