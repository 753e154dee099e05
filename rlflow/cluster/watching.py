"""Looks at trainer ranks while a call runs; finds the one that holds up the others."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.net.calls import RunningTime

WAITING_IN = ("/torch/distributed/", "/megatron/core/pipeline_parallel/p2p_communication")
"""Where a rank's innermost frame lies while it waits for other ranks."""


@dataclass(frozen=True)
class Doing:
    """What a rank does. phase: the call that it is in, "" between calls; frames: of the thread that
    works, innermost last, as (file, line, function, instruction)."""

    phase: str = ""
    frames: tuple[tuple[str, int, str, int], ...] = ()

    @property
    def waits(self) -> bool:
        """It waits for other ranks; or it has nothing to do."""
        return not self.frames or any(part in self.frames[-1][0] for part in WAITING_IN)

    @property
    def place(self) -> str:
        """The innermost frame, in words."""
        if not self.frames:
            return "idle"
        file, line, function, _ = self.frames[-1]
        return f"{'/'.join(file.split('/')[-3:])}:{line} in {function}"

    def stack(self) -> str:
        return "\n".join(
            f"  {file}:{line} in {function}" for file, line, function, _ in self.frames
        )


class Work:
    """Of one rank: the call that its working thread is in, to be looked at from another thread."""

    _phase = ""
    _thread = 0

    def begin(self, phase: str) -> None:
        self._phase, self._thread = phase, threading.get_ident()

    def end(self) -> None:
        self._phase = ""

    def look(self) -> Doing:
        """What the working thread does just now."""
        frame = sys._current_frames().get(self._thread) if self._phase else None
        frames = []
        while frame is not None:
            code = frame.f_code
            frames.append((code.co_filename, frame.f_lineno, code.co_name, frame.f_lasti))
            frame = frame.f_back
        return Doing(self._phase, tuple(reversed(frames)))


class Stillness:
    """How long nobody has moved, in seconds in which this process ran: those who answered a look
    were where they had been."""

    def __init__(self, limit_s: float, time: RunningTime | None = None) -> None:
        self.limit_s = limit_s
        self._time = time or RunningTime(limit_s / 4)
        self._seen: dict[int, Doing] = {}
        self._since_s = 0.0

    def look(self, found: Mapping[int, Doing | None]) -> bool:
        """Takes note of what the ranks do that have not finished, None for one that does not
        answer; True where nobody has moved for `limit_s`."""
        now_s = self._time.look()
        moved = {
            rank: doing
            for rank, doing in found.items()
            if doing not in (None, self._seen.get(rank))
        }
        if moved:
            self._seen |= moved
            self._since_s = now_s
        return now_s - self._since_s >= self.limit_s


def verdict(
    phase: str, found: Mapping[int, Doing | None], finished: Sequence[int], limit_s: float
) -> str:
    """One line: who holds up a call that does not end, and where. Those who do not answer, else
    those who do not wait for others, else all."""
    silent = [rank for rank, doing in found.items() if doing is None]
    busy = [rank for rank, doing in found.items() if doing is not None and not doing.waits]
    guilty = sorted(silent or busy or found)
    parts = [_told(rank, found[rank]) for rank in guilty]
    others = sorted(set(found) - set(guilty))
    rest = f"; waiting for it: {_numbers(others)}" if others else ""
    done = f"; finished: {_numbers(finished)}" if finished else ""
    return f"{phase}: nothing moved for {limit_s:g} s: {', '.join(parts)}{rest}{done}"


def _told(rank: int, doing: Doing | None) -> str:
    if doing is None:
        return f"rank {rank} does not answer (stopped?)"
    return f"rank {rank} is at {doing.place}"


def _numbers(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)
