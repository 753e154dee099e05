"""A taskset of verifiers 0.4, as a package offers it: one Taskset class in `__all__` of a module on the path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class InABox(Sum):
    @vf.reward
    async def file(self, runtime: Any) -> float:
        return float(await runtime.read("answer.txt") == b"1")


class SumsConfig(vf.TasksetConfig):
    most: int = 5
    boxed: bool = False
    silent: bool = False
    image: str | None = None


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        made = InABox if self.config.boxed else Sum
        for one in range(self.config.most):
            for other in range(self.config.most):
                text = f"{one} + {other} ="
                prompt = None if self.config.silent else text
                data = SumData(
                    prompt=prompt,
                    system_prompt="Only the number.",
                    answer=str(one + other),
                    image=self.config.image,
                )
                yield made(data, self.config.task)


__all__ = ["Sums"]
