"""The tools `bash`, `python` and files of a sandbox, for any environment with tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow_environments.common.choices import chosen
from rlflow_environments.common.threads import EpisodePlaces
from rlflow_environments.common.tool_calls import TextCall, tool_schema
from rlflow_environments.sandbox import ProgramResult, Sandbox
from rlflow_environments.tool_use.environment import MOST_CHARACTERS, ToolCallError, texts_of

_TOOLS = {
    "bash": ("Runs a command in a shell; shows what it prints. Files stay.", ("command",)),
    "python": ("Runs a Python program; shows what it prints.", ("code",)),
    "read_file": ("Shows a text file.", ("path",)),
    "write_file": ("Writes a text file.", ("path", "content")),
}


class BoxTools:
    """Tools over the sandboxes of episodes."""

    def __init__(self, names: Sequence[str], at_once: int | None = None) -> None:
        """names: of the tools. at_once: programs at a time. Raises ConfigError."""
        found = names and chosen(names, _TOOLS, "environment.tools", "tool")
        self.places = EpisodePlaces(at_once)
        self.schemas = tuple(_schema(name, *_TOOLS[name]) for name in found)

    async def call(
        self, box: Sandbox, call: TextCall, timeout_s: float | None = None, prefix: str = ""
    ) -> tuple[str, ProgramResult]:
        """What the policy sees, and how the program ended. prefix: what a shell begins with.

        Raises ToolCallError for a wrong call, and for one after the sandbox was ended."""
        texts = texts_of(call.arguments, *_TOOLS[call.name][1])
        if box.ended:
            raise ToolCallError("Error: the sandbox has ended, as it had too many files.")
        async with self.places.here():
            if call.name == "bash":
                result = await box.bash(f"{prefix}{texts[0]}\n", timeout_s)
            elif call.name == "python":
                result = await box.python(texts[0], timeout_s=timeout_s)
            elif call.name == "read_file":
                result = await box.run(["cat", "--", texts[0]], timeout_s=timeout_s)
            else:
                result = await box.write(texts[0], texts[1])
        return result.told(MOST_CHARACTERS) or "[no output]", result


def _schema(name: str, description: str, parameters: Sequence[str]) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    required = {"type": "object", "properties": properties, "required": list(parameters)}
    return tool_schema(name, description, required)
