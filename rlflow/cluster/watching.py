"""Whether ranks still work: what each one does, asked while a call runs, and who holds up the others when nobody moves."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlflow.rollout.calls import RunningTime

WAITING_IN = ("/torch/distributed/", "/megatron/core/pipeline_parallel/p2p_communication")
"""Where a rank's innermost frame lies while it waits for other ranks."""
PATIENCE = 3.0
"""A call may stand still for so many times as long as the longest of its kind took before: a checkpoint is written by other
threads, and the one that waits for them does not move."""
SILENCE = 2.0
"""A rank that has not answered for so many limits holds up the call, whatever the others do: it cannot end without it."""
DUMP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Doing:
    """What a rank does. phase: the call that it is in, "" between calls; frames: of the thread that works, innermost last, as
    (file, line, function, instruction)."""

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
        return "\n".join(f"  {file}:{line} in {function}" for file, line, function, _ in self.frames)


class Work:
    """Of one rank: the call that its working thread is in, to be looked at from another thread."""

    def __init__(self) -> None:
        self._phase = ""
        self._thread = 0

    def begin(self, phase: str) -> None:
        self._phase, self._thread = phase, threading.get_ident()

    def end(self) -> None:
        self._phase = ""

    def look(self) -> Doing:
        """What the working thread does just now."""
        frame = sys._current_frames().get(self._thread) if self._phase else None
        frames = []
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, frame.f_lasti))
            frame = frame.f_back
        return Doing(self._phase, tuple(reversed(frames)))


@dataclass
class StallLimits:
    """For how long each kind of call may stand still: never less than floor_s, and longer where it has taken long before."""

    floor_s: float
    longest_s: dict[str, float] = field(default_factory=dict)

    def of(self, phase: str) -> float:
        """Seconds."""
        return max(self.floor_s, PATIENCE * self.longest_s.get(phase, 0.0))

    def took(self, phase: str, seconds: float) -> None:
        """Takes note of a call that ended well."""
        self.longest_s[phase] = max(seconds, self.longest_s.get(phase, 0.0))


@dataclass
class Stillness:
    """How long ranks have not moved: the same frames at every look, or no answer. None stands for no answer."""

    limit_s: float
    seen: dict[int, Doing | None] = field(default_factory=dict)
    since_s: dict[int, float] = field(default_factory=dict)
    answered_s: dict[int, float] = field(default_factory=dict)
    time: RunningTime | None = None  # looked at by each look that is not told the time

    def look(self, found: Mapping[int, Doing | None], now_s: float | None = None) -> bool:
        """Takes note of what the ranks do that have not finished; True where none of them has moved for `limit_s`, or one has not
        answered for much longer."""
        if now_s is None:
            self.time = self.time or RunningTime(self.limit_s / 4)
            now_s = self.time.look()
        for rank, doing in found.items():
            if rank not in self.seen or (doing is not None and doing != self.seen[rank]):
                self.since_s[rank] = now_s
            if doing is not None or rank not in self.seen:
                self.seen[rank] = doing
                self.answered_s[rank] = now_s
        silent = any(now_s - self.answered_s[rank] >= SILENCE * self.limit_s for rank in found)
        return silent or (bool(found) and all(now_s - self.since_s[rank] >= self.limit_s for rank in found))


def culprits(found: Mapping[int, Doing | None]) -> list[int]:
    """The ranks that the others wait for: those that do not answer, else those that are not waiting themselves, else all."""
    silent = [rank for rank, doing in found.items() if doing is None]
    busy = [rank for rank, doing in found.items() if doing is not None and not doing.waits]
    return sorted(silent or busy or found)


def verdict(phase: str, found: Mapping[int, Doing | None], finished: Sequence[int], limit_s: float) -> str:
    """One line: who holds up a call that does not end, and where."""
    parts = []
    for rank in culprits(found):
        doing = found[rank]
        parts.append(f"rank {rank} does not answer (stopped?)" if doing is None else f"rank {rank} is at {doing.place}")
    others = sorted(set(found) - set(culprits(found)))
    rest = f"; waiting for it: {_numbers(others)}" if others else ""
    done = f"; finished: {_numbers(finished)}" if finished else ""
    return f"{phase}: nothing moved for {limit_s:g} s: {', '.join(parts)}{rest}{done}"


def native_stack(pid: int) -> str:
    """What py-spy says of a process of this machine, of a stopped one too; "" where it is not installed, or may not look."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.rstrip()


def _numbers(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)
