"""A list of attempts that a flow plays to its end: in other processes, where some may be lost and are played again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import Empty

from rlflow.rollout.episodes import Attempt
from rlflow.rollout.flow import Ended, Flow, Losses, Lost
from rlflow.rollout.submission import OnEpisode, Submission
from rlflow.types import Group


class FlowSubmission(Submission):
    """As `Submission`, over a flow that it closes. together: starts attempts that end, or are lost, together; None: each on its
    own. Groups come together only while somebody reads `completed`."""

    def __init__(
        self,
        attempts: Sequence[Attempt],
        max_aborted_share: float | None,
        flow: Flow,
        on_episode: OnEpisode | None = None,
        together: Callable[[Sequence[Attempt]], None] | None = None,
    ) -> None:
        super().__init__(attempts, max_aborted_share, on_episode)
        self._flow = flow
        self._together = together
        self._places = {attempt.request_id: index for index, attempt in enumerate(attempts)}
        self._lanes = {name: lane for lane, name in enumerate(self.group_ids)}
        self._losses = Losses()
        self._begin(attempts)

    def _begin(self, attempts: Sequence[Attempt]) -> None:
        if self._together is not None and attempts:
            self._together(attempts)
            return
        for attempt in attempts:
            self._flow.start(attempt, self._lanes[attempt.group_id])

    def _next(self) -> Group | None:
        while True:
            try:
                return self._groups.get_nowait()
            except Empty:
                if self.ended:
                    return None
            lost = []
            for item in self._flow.news(self._flow.poll_s):
                place = self._places[item.request_id]
                if isinstance(item, Ended):
                    self._end(place, item.trajectory)
                elif isinstance(item, Lost):
                    self._losses.add(item.request_id, item)
                    lost.append(place)
            self._begin([self._attempts[place] for place in sorted(lost)])

    @property
    def ended(self) -> bool:
        """Whether nothing is in flight any more."""
        return self._ended == len(self._attempts)

    def result(self) -> None:
        """Of no effect: what is wrong with the set-up is raised by `completed`."""

    def on_end(self, function: Callable[[], None]) -> None:
        raise NotImplementedError("whoever reads `completed` knows")

    def cancel(self) -> None:
        """Ends the attempts in flight; of no effect where they have ended."""
        self._flow.close()
