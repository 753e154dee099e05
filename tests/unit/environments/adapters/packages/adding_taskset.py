"""A taskset of verifiers 0.4 with tools: one of each task, which knows its numbers, and one that all share."""

from collections.abc import Iterator

import verifiers.v1 as vf
from adder_toolset import Adder


class AddingData(vf.TaskData):
    numbers: tuple[int, int]


class Hidden(vf.Toolset[vf.ToolsetConfig, vf.State]):
    async def setup_task(self, task: AddingData) -> None:
        self.numbers = task.numbers

    @vf.tool
    async def numbers_of_the_task(self) -> str:
        """The two numbers."""
        return " ".join(map(str, self.numbers))


class Adding(vf.Task[AddingData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Hidden(vf.ToolsetConfig())]

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(sum(self.data.numbers)))


class AddingTaskset(vf.Taskset[Adding, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Adder(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[Adding]:
        for one in range(20):
            yield Adding(AddingData(prompt="Add them.", numbers=(one, 2 * one)), self.config.task)


__all__ = ["AddingTaskset"]

if __name__ == "__main__":
    Hidden.run()
