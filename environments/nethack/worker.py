"""Plays games of NetHack, each in a process of its own that another one watches, forked for every
connection to a socket.

nle is C inside of the process that plays, so that a crash of it ends one game alone; a timer of the
system ends one that hangs. Started apart from the training process, with which all of it ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

MORE, ESCAPE, MORE_MARK = ord(" "), ord("\x1b"), "--More--"
MENU_MARKS = ("(end)", "(1 of ")
MOST_PAGES = 100
PAGE = 2  # of `misc`: what the game waits for, beside an answer and a text
SCORE, DEPTH, DUNGEON, LEVEL = 9, 12, 23, 24  # of `blstats`; it begins with column and row
PANICKED = 11  # of `how_done`: the game gave itself up
KEYS = ("chars", "blstats", "message", "misc", "tty_chars")


class PlayedGame:
    """A game in this process. Raises RuntimeError where it gives itself up."""

    def __init__(self, nethack: Any, character: str, seed: int) -> None:
        self._game = nethack.Nethack(
            KEYS, f"Agent-{character}", None, copy=True, fix_moon_phase=True
        )
        self._game.set_initial_seeds(seed, seed, False)
        self._seen = dict(zip(KEYS, self._game.reset(), strict=True))
        self._done = False
        self._said: list[str] = []
        self._status = ""
        self._turn_pages()

    def view(self, refused: bool = False) -> dict[str, Any]:
        """What is to be seen, and what was said since the last call."""
        numbers, said, self._said = self._seen["blstats"], self._said, []
        if not self._seen["misc"][PAGE] and not self._done:
            self._status = self._screen()[-1].strip()
        return {
            "said": said,
            "rows": [bytes(row).decode("latin-1") for row in self._seen["chars"]],
            "at": [int(numbers[0]), int(numbers[1])],
            "place": [int(numbers[DUNGEON]), int(numbers[LEVEL])],
            "depth": int(numbers[DEPTH]),
            "score": int(numbers[SCORE]),
            "status": self._status,
            "asks": self._asks(),
            "refused": refused,
            "done": self._done,
        }

    def act(self, pressed: list[tuple[str, bool]]) -> dict[str, Any]:
        """Presses keys. Answers are refused where nothing is asked, and end the action."""
        for place, (keys, answers) in enumerate(pressed):
            if answers and not self._asks():
                return self.view(refused=place == 0)
            if not answers and self._seen["misc"][PAGE]:
                self._press(ESCAPE)
            for key in keys:
                self._press(ord(key))
        return self.view()

    def _asks(self) -> bool:
        return bool(self._seen["misc"].any())

    def _press(self, key: int) -> None:
        if not self._done:
            self._step(key)
            self._turn_pages()

    def _step(self, key: int) -> None:
        before = self._seen
        found, self._done = self._game.step(key)
        self._seen = dict(zip(KEYS, found, strict=True))
        if self._done:
            if self._game.how_done() == PANICKED:
                raise RuntimeError("the game panicked")
            self._seen |= {name: before[name] for name in ("chars", "blstats")}  # else empty

    def _turn_pages(self) -> None:
        """Notes messages; goes on to the end of all that the game says and asks nothing about."""
        for _ in range(MOST_PAGES):
            page, marked = "", False
            if self._seen["misc"][PAGE]:
                page, marked = _page(self._screen())
            message = bytes(self._seen["message"]).split(b"\0")[0].decode("latin-1").strip()
            text = page if marked or not message else message
            if text and self._said[-1:] != [text]:
                self._said.append(text)
            if self._done or marked or not self._seen["misc"][PAGE]:
                return
            self._step(MORE)
        raise RuntimeError(f"the game shows more than {MOST_PAGES} pages")

    def _screen(self) -> list[str]:
        return [bytes(row).decode("latin-1") for row in self._seen["tty_chars"]]


def _page(screen: list[str]) -> tuple[str, bool]:
    """The text in front of the map, and whether it is a page of a menu or list, which stays."""
    for row, line in enumerate(screen):
        for mark in (*MENU_MARKS, MORE_MARK):
            column = line.find(mark)
            if column >= 0:
                column = column if column > 1 else 0  # over the whole screen
                lines = [one[column:].rstrip() for one in screen[: row + (mark != MORE_MARK)]]
                return "\n".join(lines).strip("\n"), mark != MORE_MARK
    return "", False


def play(connection: socket.socket, nethack: Any) -> None:
    """A game to the end of its connection: a line with what it is, then one per action."""
    with connection.makefile("rwb") as stream:
        asked = json.loads(stream.readline() or "{}")
        if not asked:
            return
        signal.setitimer(signal.ITIMER_REAL, asked["limit_s"])
        game = PlayedGame(nethack, asked["character"], asked["seed"])
        answer = game.view()
        while True:
            signal.setitimer(signal.ITIMER_REAL, 0)
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()
            line = stream.readline()
            if not line:
                return
            signal.setitimer(signal.ITIMER_REAL, asked["limit_s"])
            answer = game.act(json.loads(line))


@contextlib.contextmanager
def address(folder: Path) -> Iterator[str]:
    """Of the games' socket: Linux allows 108 characters, and a TMPDIR may have more."""
    opened = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{opened}/games"
    finally:
        os.close(opened)


def serve(folder: Path, nethack: Any) -> None:
    """Forks a game for every connection; returns where the training process has ended or wants an
    end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a watch has ended
    listener = socket.socket(socket.AF_UNIX)
    with address(folder) as place:
        listener.bind(place)
    listener.listen(1024)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while 0 not in select.select([0, listener], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            watch(connection, folder / f"game-{os.getpid()}", nethack)
        connection.close()


def watch(connection: socket.socket, folder: Path, nethack: Any) -> NoReturn:
    """Plays a game in a process of its own, which ends with its connection, and tells the
    connection why the process has ended. folder: of the game's files."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        game = os.fork()
        if game == 0:
            play_alone(connection, folder, nethack)
        poll = select.poll()
        poll.register(os.pidfd_open(game), select.POLLIN)
        poll.register(connection, select.POLLRDHUP)
        poll.poll()
        os.kill(game, signal.SIGKILL)  # unless it has ended
        _, status = os.waitpid(game, 0)
        shutil.rmtree(folder, ignore_errors=True)
        if os.WIFSIGNALED(status):
            number = signal.Signals(os.WTERMSIG(status))
            hung = number == signal.SIGALRM
            _tell(connection, "it hung" if hung else f"its process ended by {number.name}")
    finally:
        os._exit(0)


def play_alone(connection: socket.socket, folder: Path, nethack: Any) -> NoReturn:
    try:
        folder.mkdir()
        tempfile.tempdir = str(folder)
        play(connection, nethack)
    except Exception as error:  # noqa: BLE001 -- of whatever kind: it is this game's
        _tell(connection, f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)  # nothing of the server's is to be cleaned up here


def _tell(connection: socket.socket, why: str) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps({"failed": why}).encode() + b"\n")


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # processes with threads do not fork well
    from nle.nethack import nethack

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nobody empties the pipe from here on
    try:
        serve(folder, nethack)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # all games, and this


if __name__ == "__main__":
    main()
