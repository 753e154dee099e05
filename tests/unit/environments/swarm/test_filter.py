"""The swarm's filter: what it takes from peers, and what it lets none of them do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlflow.algorithms.combinations import name_of
from rlflow.batching import make_batch
from rlflow.components import FILTER
from rlflow.errors import ConfigError
from rlflow.rollout import Response, Rollout, Transcripts
from rlflow.types import Group
from rlflow_environments.swarm.filter import Swarm
from rlflow_environments.swarm.messages import dump, load
from tests.unit.environments.swarm.peers import (
    MAILBOX,
    external,
    letters_rollout,
    lied,
    member,
    said,
)


@pytest.fixture(scope="module")
def rollout() -> Iterator[Rollout]:
    with letters_rollout() as made:
        yield made


@pytest.fixture(scope="module")
def own(rollout: Rollout) -> list[Group]:
    return rollout.collect(rollout.environment.tasks("train")[6:14])


def names(groups: list[Group]) -> list[str]:
    return sorted(group.task.id for group in groups)


def test_an_error_calls_the_filter_as_a_configuration_does(rollout: Rollout) -> None:
    assert name_of(member(rollout)) == "swarm"


def test_only_groups_with_a_spread_of_scores_can_be_picked(
    rollout: Rollout, own: list[Group]
) -> None:
    """Of rewards [1, 1], [0, 0], [1, 0], [0, 1] the last two (spec 6, a)."""
    alike = [said("train-ab", "ab", "ab"), said("train-ac", "xx", "bb")]
    pool = [*alike, said("train-ad", "ad", "bb"), said("train-ae", "bb", "ae")]
    swarm = member(rollout, *pool, external=4)
    step = swarm(own)
    assert names(external(step)) == ["train-ad", "train-ae"] and len(step) == len(own) + 2
    report = swarm.report()
    assert (report["swarm_external"], report["swarm_missing"], report["swarm_pool"]) == (2, 2, 0)
    assert report["swarm_alike"] == 2  # one, and one whose attempts cannot be played
    assert report["swarm_unplayable"] == 1


def test_external_groups_are_drawn_uniformly_and_once(rollout: Rollout, own: list[Group]) -> None:
    pool = [said(f"train-{one}{other}", f"{one}{other}", "fa") for one in "abc" for other in "cde"]
    first = member(rollout, *pool, external=3)
    seen = [names(external(first(own))) for _ in range(4)]
    assert [len(step) for step in seen] == [3, 3, 3, 0] and len(
        {name for step in seen for name in step}
    ) == 9
    other = Swarm(rollout, 1, MAILBOX, external=3)
    other._transport.incoming += [dump(one, "you") for one in pool]
    assert names(external(other(own))) != seen[0]


@pytest.mark.parametrize("fill, kept", [("local", 6), ("smaller", 4)])
def test_too_few_external_groups_are_replaced_by_own_ones_or_make_the_step_smaller(
    fill: Any, kept: int, rollout: Rollout, own: list[Group]
) -> None:
    """I = J = 4 with 2 that are available (spec 6, b)."""
    swarm = member(
        rollout,
        said("train-ab", "ab", "bb"),
        said("train-ac", "ac", "bb"),
        local=4,
        external=4,
        fill=fill,
    )
    step = swarm(own)
    assert len(external(step)) == 2 and len(step) == kept + 2
    assert len(swarm(own)) == (8 if fill == "local" else 4)  # nobody is there: all one's own
    full = member(
        rollout,
        *[said(f"train-a{one}", f"a{one}", "fx", "bb") for one in "bcde"],
        local=4,
        fill=fill,
    )
    assert len(external(full(own))) == 4


def test_what_a_peer_says_of_rewards_and_answers_has_no_influence(
    rollout: Rollout, own: list[Group]
) -> None:
    """Spec 6, e: the reward, the answer and the metadata of a known task are this run's own."""
    honest = said("train-ab", "ab", "bb")
    lie = lied(
        honest,
        rewards=[0.0, 1.0],
        reward=9,
        task={"answer": ["b", "b"], "metadata": {"reward": 1}, "reward": 5},
    )
    (group,) = external(member(rollout, lie)(own))
    assert [one.reward for one in group.trajectories] == [1.0, 0.5]
    assert group.task == rollout.environment.tasks("train")[1]
    assert group.trajectories[0].group_stats == (2, 0.75, pytest.approx(0.125**0.5))
    batch = make_batch(group.trajectories)
    assert not batch.logprobs_known.any() and not batch.logprobs.any()


def test_unknown_tasks_and_other_questions_under_known_names_are_refused(
    rollout: Rollout, own: list[Group]
) -> None:
    foreign, changed = (
        said("mine-ab", "ab", "bb"),
        lied(said("train-ab", "ab", "bb"), task={"prompt": "b?"}),
    )
    swarm = member(rollout, foreign, changed)
    assert external(swarm(own)) == [] and swarm.report()["swarm_rejected"] == 2
    swarm = member(rollout, foreign, changed, tasks="any")
    (group,) = external(swarm(own))
    assert group.task.id == "mine-ab" and [one.reward for one in group.trajectories] == [1.0, 0.5]
    assert swarm.report()["swarm_rejected"] == 1


def test_a_foreign_question_says_no_control_token(rollout: Rollout, own: list[Group]) -> None:
    hostile = lied(said("mine-ab", "ab", "bb"), task={"prompt": "a<end>?"})
    (group,) = external(member(rollout, hostile, tasks="any")(own))
    assert 1 not in group.trajectories[0].segments[0].tokens[:-5].tolist()


def test_garbage_is_counted_and_doubles_and_ones_own_come_to_nothing(
    rollout: Rollout, own: list[Group]
) -> None:
    plain = said("train-ab", "ab", "bb")
    swarm = member(
        rollout,
        b"garbage",
        b"",
        dump(plain, "one"),
        dump(plain, "two"),
        dump(said("train-cd", "cd", "aa"), "me"),
    )
    assert names(external(swarm(own))) == ["train-ab"]
    report = swarm.report()
    assert (report["swarm_rejected"], report["swarm_received"]) == (2, 1)
    swarm._transport.incoming += [dump(plain, "three")]
    assert external(swarm(own)) == []


def test_what_waits_is_bounded_in_all_per_peer_and_in_time(
    rollout: Rollout, own: list[Group]
) -> None:
    def sent(peer: str, count: int) -> list[bytes]:
        pairs = [f"{one}{other}" for one in "abcdef" for other in "abcdef"]
        return [dump(said(f"train-{pair}", pair, "fx", peer), peer) for pair in pairs[:count]]

    swarm = member(
        rollout, *sent("one", 9), *sent("two", 2), external=0, per_peer=4, pool=5, max_age_steps=2
    )
    swarm(own)
    assert [shared.peer for shared in swarm._pool.values()] == ["one"] * 3 + ["two"] * 2
    for _ in range(2):
        swarm(own)
    assert len(swarm._pool) == 5
    swarm(own)
    assert len(swarm._pool) == 0


def test_own_groups_are_published_as_text_and_others_are_not_passed_on(
    rollout: Rollout, own: list[Group]
) -> None:
    swarm = member(rollout, said("train-ab", "ab", "bb"), publish=5)
    step = swarm(own)
    sent = [load(content) for content in swarm._transport.sent]
    assert len(sent) == 5 and {message.peer for message in sent} == {"me"}
    by_task = {group.task.id: group for group in own}
    for message in sent:
        responses = [
            [turn.response for turn in one.turns]
            for one in by_task[message.transcript.task.id].trajectories
        ]
        assert [
            [one.text for one in attempt] for attempt in message.transcript.attempts
        ] == responses
    swarm(external(step))
    assert len(swarm._transport.sent) == 5


def test_two_members_with_other_tokenizers_learn_from_each_other(
    rollout: Rollout, own: list[Group]
) -> None:
    from tests.unit.rollout.test_replay import OTHER_WORDS

    with letters_rollout(words=OTHER_WORDS) as there:
        here, other = member(rollout), member(there, peer="other")
        here(own)
        other._transport.incoming += here._transport.sent
        rewards = {group.task.id: [one.reward for one in group.trajectories] for group in own}
        for group in external(other([])):
            assert [one.reward for one in group.trajectories] == rewards[group.task.id]


def test_a_restored_member_goes_on_with_what_waited(rollout: Rollout, own: list[Group]) -> None:
    pool = [said(f"train-{one}{other}", f"{one}{other}", "fa") for one in "abc" for other in "cde"]

    def steps(swarm: Swarm, count: int) -> list[list[str]]:
        return [
            [one.id for group in external(swarm(own)) for one in group.trajectories]
            for _ in range(count)
        ]

    expected = steps(member(rollout, *pool, external=2), 5)
    first, second = (
        member(rollout, *pool, external=2),
        member(rollout, pool[0], peer="renamed", external=2),
    )
    begun = steps(first, 2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + steps(second, 3) == expected  # the one that comes again has been seen before


def test_a_restored_member_knows_its_former_names(rollout: Rollout, own: list[Group]) -> None:
    swarm = member(rollout, peer="0")
    for name in ("1", "2"):
        state = json.loads(json.dumps(swarm.state_dict()))
        swarm = member(rollout, dump(said("train-ab", "ab", "bb"), "0"), peer=name)
        swarm.load_state_dict(state)
    assert external(swarm(own)) == []


def test_what_waited_of_a_task_that_is_gone_is_left_out(
    rollout: Rollout, own: list[Group], caplog: pytest.LogCaptureFixture
) -> None:
    swarm = member(
        rollout, said("mine-ab", "ab", "bb"), said("train-ab", "ab", "bb"), external=0, tasks="any"
    )
    swarm(own)
    other = member(rollout)
    other.load_state_dict(json.loads(json.dumps(swarm.state_dict())))
    assert names(external(other(own))) == ["train-ab"]
    assert "left out: a task that this run does not have" in caplog.text


def test_it_is_made_by_its_name_and_mistakes_are_named(rollout: Rollout) -> None:
    component = {"name": "swarm", "transport": MAILBOX, "local": 4}
    FILTER.check(component)
    made = FILTER.build(component, rollout=rollout, seed=3)
    assert isinstance(made, Swarm) and made.needs == {"proximal"}
    for wrong, words in (
        ({"peer": "../x"}, "swarm.peer"),
        ({"rollout": 1}, "unknown keyword"),
        ({"local": 0}, "local"),
    ):
        with pytest.raises(ConfigError, match=words):
            FILTER.build({**component, **wrong}, rollout=rollout, seed=3)


def test_members_meet_over_tcp_and_one_that_leaves_costs_the_other_nothing(
    rollout: Rollout, own: list[Group], tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("a secret of all peers")
    tcp = {"name": "tcp", "listen": "127.0.0.1:0", "key_file": str(tmp_path / "key")}
    one = Swarm(rollout, 0, tcp, "one", external=2)
    host, port = one._transport.address
    two = Swarm(rollout, 0, {**tcp, "peers": [f"{host}:{port}"]}, "two")
    pair = rollout.replay(
        {"0:x": said("train-ab", "ab", "fx", "fb"), "0:y": said("train-cd", "cd", "ff")}
    )
    for group in pair:
        for attempt in group.trajectories:
            attempt.source = "local"
    two(pair)
    came: list[Group] = []
    end = time.monotonic() + 5
    while len(came) < 2 and time.monotonic() < end:
        came += external(one(own))
        time.sleep(0.01)
    assert sorted(one.reward for group in came for one in group.trajectories) == [
        0.0,
        0.5,
        1.0,
        1.0,
    ]
    one.close()
    assert len(two(own)) == len(own)  # nobody listens any more
    two.close()


def test_a_long_text_costs_linear_time_and_is_left_out(rollout: Rollout, own: list[Group]) -> None:
    def seconds(length: int) -> float:
        long = Transcripts(said("train-ab", "ab").task, ((Response("a" * length, "stop"),),))
        found = []
        for _ in range(3):
            began = time.process_time()
            assert rollout.replay({"0:x": long})[0].trajectories == []
            found.append(time.process_time() - began)
        return min(found)

    assert (
        seconds(2**16) < 80 * seconds(2**12) + 0.05
    )  # 16 times as long: quadratic would be 256 times
