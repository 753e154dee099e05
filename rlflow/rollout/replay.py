"""Episodes from text: what was said elsewhere, played through the environment of this run and in
its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from rlflow.errors import RLFlowError, RolloutError
from rlflow.rollout.codec import Response, Transcripts
from rlflow.rollout.engine import Completion, FixedEngine, Sampling
from rlflow.rollout.episodes import Attempt, EpisodePlayer
from rlflow.rollout.event_loop import LoopThread
from rlflow.rollout.players import Ended, LocalPlayer
from rlflow.rollout.tokenizer import Tokenizer
from rlflow.types import Group, Segment, Trajectory, stamp

AT_A_TIME = 16  # attempts of a group


def replay(
    transcripts: Mapping[str, Transcripts],
    tokenizer: Tokenizer,
    player: EpisodePlayer,
    thread: LoopThread,
) -> list[Group]:
    """A stamped group per transcript, by group id, in their order, of the attempts that could be
    played: source `external`, log-probs not known, the loss mask on exactly the responses, the
    rewards those that the player's environment gave.

    Left out are attempts whose episode did not end with their last response, that the tokenizer
    cannot say or that exceed a limit, and all of a transcript that breaks the environment's
    contract: one that no attempt is left of is an empty group."""
    played = [
        _Played(name, transcript, tokenizer, player, thread)
        for name, transcript in transcripts.items()
    ]
    try:
        return [one.group() for one in played]
    finally:
        for one in played:
            one.player.close()


class ScriptedEngine(FixedEngine):
    """An engine that has no model: request by request it says what a script holds."""

    max_concurrency = AT_A_TIME

    def __init__(self, tokenizer: Tokenizer, scripts: Mapping[str, Sequence[Response]]) -> None:
        self._tokenizer = tokenizer
        self._left = {request: list(reversed(script)) for request, script in scripts.items()}

    def ended(self, request_id: str) -> bool:
        """Whether the script has been said to its end."""
        return not self._left[request_id]

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Completion:
        """The script's next response. Raises RolloutError where there is none, or it cannot be
        said."""
        left = self._left[request_id or ""]
        if not left:
            raise RolloutError("transcript: the episode goes on where its responses end")
        response = left.pop()
        said = self._tokenizer.encode_response(response.text)
        if self._tokenizer.decode(said, skip_special_tokens=False) != response.text:
            raise RolloutError("transcript: the tokenizer has no tokens for a response")
        if response.end == "eos":
            said += self._tokenizer.eos_ids[:1]
        if not 0 < len(said) <= sampling.max_tokens:
            raise RolloutError(
                f"transcript: expected a response of 1 to {sampling.max_tokens} tokens, found "
                f"{len(said)}"
            )
        return Completion(
            said,
            [0.0] * len(said),
            [-1] * len(said),
            "length" if response.end == "length" else "stop",
        )


class _Played:
    """A transcript on its way to a group. Each has a player of its own, so that none can spoil the
    others."""

    def __init__(
        self,
        name: str,
        transcript: Transcripts,
        tokenizer: Tokenizer,
        episodes: EpisodePlayer,
        thread: LoopThread,
    ) -> None:
        self._name, self._task = name, transcript.task
        scripts = {
            f"{name}/{number}": responses for number, responses in enumerate(transcript.attempts)
        }
        self._engine = ScriptedEngine(tokenizer, scripts)
        self._left = len(scripts)
        self.player = LocalPlayer(thread, [self._engine], episodes)
        self.player.start([
            Attempt(transcript.task, name, request, lambda turn: turn, number, request)
            for number, request in enumerate(scripts)
        ])  # fmt: skip

    def group(self) -> Group:
        """The attempts that could be played, waited for."""
        try:
            played = sorted(self._ended(), key=lambda one: one.attempt)
        except RLFlowError:  # what is a mistake of the set-up in an episode of one's own
            played = []
        usable = [one for one in played if one.usable and self._engine.ended(one.id)]
        group = Group(self._name, self._task, [_external(one) for one in usable])
        stamp(group.trajectories)
        return group

    def _ended(self) -> Iterator[Trajectory]:
        while self._left:
            for event in self.player.events(self.player.poll_s):
                if isinstance(event, Ended):
                    self._left -= 1
                    yield event.trajectory


def _external(trajectory: Trajectory) -> Trajectory:
    segments: list[Segment] = [
        dataclasses.replace(segment, logprobs=None) for segment in trajectory.segments
    ]
    return dataclasses.replace(trajectory, segments=segments, source="external", group_stats=None)
