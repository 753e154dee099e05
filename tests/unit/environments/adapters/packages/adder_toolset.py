"""A tool of verifiers 0.4 that the tasks of a taskset share: a module of its own, as it is a process of its own."""

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, first: int, second: int) -> str:
        """Adds."""
        return str(first + second)


if __name__ == "__main__":
    Adder.run()
