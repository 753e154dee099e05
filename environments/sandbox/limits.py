"""Limits of programs in a sandbox, and what came of a program."""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.errors import ConfigError
from rlflow.values import PositiveFloat, PositiveInt, checked, hints_of

ENDINGS = {
    "time": "it ran longer than {timeout_s:g} s",
    "memory": "it used more than {memory_mb} MiB of memory, its files included",
    "processes": "it had more than {processes} processes and threads at once",
    "cpu": "it kept more than {cpus:g} processors busy",
    "files": "it made more than {files} files",
}
"""Limit that ended a program -> what it did."""


@dataclass(frozen=True)
class Limits:
    """Of a sandbox, and of each program in it: whichever is reached ends the program, and all that
    it started.

    timeout_s: of a program that is run without one of its own. memory_mb: resident memory of all
    processes together (a page that two share counts twice) and the files. disk_mb: of the files,
    which are held in memory; beyond it the program meets a full disk. processes: threads counted.
    cpus: processors kept busy on average; two seconds more are let pass. output_bytes: of stdout
    and of stderr; of a longer one the middle is left out."""

    timeout_s: PositiveFloat = 10.0
    memory_mb: PositiveInt = 1024
    disk_mb: PositiveInt = 64
    files: PositiveInt = 10_000
    processes: PositiveInt = 32
    cpus: PositiveFloat = 1.0
    output_bytes: PositiveInt = 32_768

    def __post_init__(self) -> None:
        for name, hint in hints_of(Limits).items():
            if name in vars(self):
                checked(hint, getattr(self, name), f"limits.{name}")
        if 2 * self.disk_mb >= self.memory_mb:
            raise ConfigError(
                f"limits.disk_mb: expected less than half of memory_mb ({self.memory_mb}), as "
                f"files are held in memory, found {self.disk_mb}."
            )


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended.

    code: its exit code, or minus the number of the signal that ended it. limit: of ENDINGS, where
    one ended it. left_out: bytes of its output that were cut. limits: under which it ran."""

    code: int
    stdout: str
    stderr: str
    duration_s: float
    limit: str = ""
    left_out: int = 0
    limits: Limits = Limits()

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and not self.limit

    @property
    def output(self) -> str:
        """What it wrote, stdout first."""
        both = [text for text in (self.stdout, self.stderr) if text]
        return "".join(text if text.endswith("\n") else f"{text}\n" for text in both)

    @property
    def ending(self) -> str:
        """How it ended, in words; "" where it succeeded."""
        if self.limit:
            return f"killed: {ENDINGS[self.limit].format(**vars(self.limits))}"
        return "" if self.code == 0 else f"exit code {self.code}"

    def told(self, most: int = 2_000) -> str:
        """The end of its output, at most so many characters, and how it ended: an observation."""
        text = self.output
        if len(text) > most:
            text = f"[{len(text) - most} characters left out]\n{text[-most:]}"
        return f"{text}[{self.ending}]\n" if self.ending else text
