"""A small game behind openenv's own server library: `python openenv_server.py MOST_SESSIONS` prints its port and serves; with
`echo` behind it OpenEnv's own echo environment, as its repository has it.

Runs under an interpreter that has openenv; the game is Guess: a number from 0 to 9 by the seed, three attempts, higher or lower.
"""

from __future__ import annotations

import random
import socket
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        self._number, self._left = random.Random(seed).randrange(options.get("numbers", 10)), 3
        return Hint(hint="Which number?")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        if action.number == 13:
            raise RuntimeError("out of luck")
        if action.number == 99:
            time.sleep(5)
        self._left -= 1
        right = action.number == self._number
        hint = "right" if right else "higher" if action.number < self._number else "lower"
        return Hint(hint=hint, reward=float(right), done=right or self._left == 0)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    played: Any = (Guessing, Guess, Hint)
    if "echo" in sys.argv:
        from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
        from packages.openenv_echo.echo_environment import EchoEnvironment

        played = (EchoEnvironment, CallToolAction, CallToolObservation)
    app = create_fastapi_app(*played, max_concurrent_envs=int(sys.argv[1]))
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
