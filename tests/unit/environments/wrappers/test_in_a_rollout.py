"""Claims about wrappers in a rollout: named rewards of trajectories, and episodes that nobody could judge."""

from __future__ import annotations

from pathlib import Path

from rlflow.rollout import Rollout
from rlflow.types import StopReason
from rlflow_environments.common import judge as judging
from rlflow_environments.wrappers.intrinsic import IntrinsicRewards
from rlflow_environments.wrappers.rubric import RubricRewards
from tests.flow.letters import Letters, write_letters_model
from tests.unit.environments.common.chat_server import ChatServer
from tests.unit.environments.retrieval.search_servers import serving
from tests.unit.environments.wrappers.small import Rooms


def test_trajectories_have_the_named_rewards_and_what_cannot_be_judged_is_left_out(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(judging, "PAUSE_S", 0.01)
    model = write_letters_model(tmp_path)
    criteria = {
        "right": {"name": "base_return", "weight": 3.0},
        "kind": {"name": "judge", "criterion": "Kind.", "whole": True},
    }
    with serving(ChatServer(500, reply='{"points": 1}')) as url:
        judge = {"url": f"{url}/v1", "model": "m", "tries": 1}
        environment = RubricRewards(Letters(), criteria, judge=judge)
        with Rollout.from_pretrained(
            model, environment, max_turns=2, max_response_tokens=2
        ) as rollout:
            (group,) = rollout.collect(
                environment.tasks("train")[:1], samples_per_prompt=8, max_aborted_share=1.0
            )
    aborted = [one for one in group.trajectories if one.stop is StopReason.ABORTED]
    assert len(aborted) == 1 and "CriterionError" in aborted[0].error
    assert len(group.usable) == 7
    for one in group.usable:
        assert one.rewards["kind"] == 1.0 and one.reward == 3 * one.rewards["right"] + 1


def test_a_base_with_plain_methods_is_played_beside_the_event_loop(tmp_path: Path) -> None:
    model = write_letters_model(tmp_path)
    environment = IntrinsicRewards(
        Rooms(), "Go far.", endpoint={"url": "http://127.0.0.1:9", "model": "m"}
    )
    with Rollout.from_pretrained(
        model, environment, max_response_tokens=2, max_total_tokens=600
    ) as rollout:
        groups = rollout.collect(environment.tasks("train"))
    for trajectory in (one for group in groups for one in group.trajectories):
        assert trajectory.usable and trajectory.turns, trajectory.error
        assert trajectory.rewards == {
            "steps": float(len(trajectory.turns)),
            "extrinsic": 0.0,
            "intrinsic": 0.0,
        }
