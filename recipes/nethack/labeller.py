"""Rules in place of a language model that labels messages of NetHack, behind OpenAI's protocol.

python labeller.py ERRORS      ERRORS: share of the messages whose label is wrong, for ever

Prints its address and ends with the process that started it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recipes.rule_server import RuleServer

PROGRESS = re.compile(
    "direction do you want to dig|use or apply|dig a (pit|hole)|digging downward|fall through"
)
MESSAGE = re.compile(r"shown the message (\".*\")\.\n")


def label(prompt: str, errors: float) -> str:
    """FOO for a message that tells of digging down, BAR for another one."""
    found = MESSAGE.search(prompt)
    message = json.loads(found[1]) if found else ""
    wrong = zlib.crc32(message.encode()) % 1000 < 1000 * errors
    return "By the rules. " + ("FOO" if bool(PROGRESS.search(message)) != wrong else "BAR")


def main() -> None:
    owner, errors = os.getppid(), float(sys.argv[1])
    with RuleServer(lambda prompt: label(prompt, errors)) as server:
        print(server.url, flush=True)
        while os.getppid() == owner:
            time.sleep(1)


if __name__ == "__main__":
    main()
