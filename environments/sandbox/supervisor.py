"""First process of a sandbox: runs one program at a time, measures it, and ends all that it left.

Run by its path and without packages, as process 1 of the sandbox's namespace, which no process
inside can kill. A request comes on stdin as a line of JSON and the bytes that it announces; the
answer goes to stdout in the same form. With the end of stdin, whoever asked is gone: so is the
sandbox."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

TICK_S = 0.05  # between two looks at what the processes use
SPARE_CPU_S = 2.0
SETTLE_S = 5.0  # for killed processes to be gone
ADDRESS_SPACE = 4 << 30  # bytes that libraries map beyond what they use
OPEN_FILES = 512
CHUNK, PIPE_READS = 1 << 16, 16  # a pipe holds 1 MiB at most
PDEATHSIG, DUMPABLE, CHILD_SUBREAPER = 1, 4, 36  # of prctl(2)


class Output:
    """The beginning and the end of what comes through a pipe, `most` bytes of it."""

    def __init__(self, most: int) -> None:
        self.head, self.tail, self.left_out = bytearray(), bytearray(), 0
        self._head, self._tail = most - most // 2, most // 2

    def read(self, fd: int) -> bool:
        """Takes what is there; False once nothing more will come."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return True
        room = self._head - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        beyond = len(self.tail) - self._tail
        if beyond > 0:
            del self.tail[:beyond]
            self.left_out += beyond
        return bool(data)

    def text(self) -> bytes:
        cut = f"\n[{self.left_out} bytes left out]\n" if self.left_out else ""
        return bytes(self.head + cut.encode() + self.tail)


class Program:
    """A program that runs: its process, what is still to be written to it, what it wrote.

    cells: it is an interpreter that is kept, whose cells come through a descriptor of their own."""

    def __init__(self, request: dict[str, Any], limits: dict[str, Any], cells: bool) -> None:
        stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
        theirs = [stdin[0], stdout[1], stderr[1]]
        self.input, self.mark = stdin[1], -1
        if cells:
            os.close(stdin[1])
            read, self.input = os.pipe()
            self.mark, written = os.pipe()
            theirs += [read, written]
        self.kept, self.left = cells, b""
        self.pid = os.fork()
        if self.pid == 0:
            become(request, limits, theirs)
        for fd in theirs:
            os.close(fd)
        self.process = os.pidfd_open(self.pid)
        self.read_ends = (stdout[0], stderr[0])
        for fd in (self.input, *self.read_ends):
            os.set_blocking(fd, False)

    def begin(self, data: bytes, most: int) -> None:
        """What it is given now, and room for what it writes."""
        self.left = data
        self.outputs = {fd: Output(most) for fd in self.read_ends}

    def feed(self) -> bool:
        """Writes what there is room for; False once nothing is left, with stdin closed."""
        try:
            self.left = self.left[os.write(self.input, self.left[:CHUNK]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            self.left = b""
        if not self.left and not self.kept:
            os.close(self.input)
            self.input = -1
        return bool(self.left)

    def drain(self) -> None:
        """Takes what its pipes still hold."""
        for fd, output in self.outputs.items():
            for _ in range(PIPE_READS):
                output.read(fd)

    def close(self) -> None:
        for fd in {self.input, self.mark, self.process, *self.read_ends} - {-1}:
            os.close(fd)


def become(request: dict[str, Any], limits: dict[str, Any], descriptors: list[int]) -> None:
    """Turns this fork into the program. One that cannot be started ends with 127, as in a shell."""
    argv = request["argv"]
    try:
        os.setsid()
        copies = [os.dup(fd) for fd in descriptors]  # above all the numbers that they get
        for number, fd in enumerate(copies):
            os.dup2(fd, number)
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        for kind, most in limits["resources"]:
            resource.setrlimit(kind, (most, most))
        for name, data in request["contents"]:
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            if os.path.lexists(name) and (os.path.islink(name) or not os.path.isfile(name)):
                os.unlink(name)  # a link or pipe of another program: it would lead elsewhere
            with open(name, "wb") as file:
                file.write(data)
        os.execvp(argv[0], argv)
    except BaseException as problem:  # noqa: BLE001 -- a fork that must not go on
        with contextlib.suppress(OSError):
            os.write(2, f"{argv[0]}: {problem}\n".encode())
    finally:
        os._exit(127)


class Supervisor:
    """Plays programs one after another.

    limits: as limits.Limits has them, with the places. confined: process 1 of a namespace."""

    def __init__(self, limits: dict[str, Any], confined: bool) -> None:
        memory = limits["memory_mb"] << 20
        resources = [
            (resource.RLIMIT_AS, memory + ADDRESS_SPACE),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
        ]
        if (
            confined
        ):  # else it would count all processes of the user; above the limit, to see who is
            resources.append((resource.RLIMIT_NPROC, 2 * limits["processes"] + 1))
        lowered = [(kind, _at_most(kind, wanted)) for kind, wanted in resources]
        self._limits = {**limits, "memory": memory, "resources": lowered}
        self._confined = confined
        self._kept: Program | None = None
        self._ended: dict[int, int] = {}

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """How the program of a request ended: a header, and what it wrote."""
        cell = request["cell"]
        program = self._kept if cell else None
        if program is None:
            program = Program(request, self._limits, cell)
        else:
            self._signal(signal.SIGCONT)
        program.begin(request["stdin"], self._limits["output_bytes"])
        limit, mark, duration_s = self._watch(program, request["timeout_s"])
        if mark:
            code = 0 if mark == b"\n" else 1
        else:
            self.end_all()
            code = os.waitstatus_to_exitcode(self._ended.get(program.pid, signal.SIGKILL))
        self._ended.clear()
        program.drain()
        outputs = list(program.outputs.values())
        for ended in {program, self._kept} - {None} if not mark else ():
            ended.close()
        self._kept = program if mark else None
        header = {"code": code, "limit": limit, "duration_s": duration_s}
        header["left_out"] = sum(output.left_out for output in outputs)
        return header, [output.text() for output in outputs]

    def _watch(self, program: Program, timeout_s: float) -> tuple[str, bytes, float]:
        """(limit that it reached, mark at the end of a cell, seconds) once it is over."""
        poll = select.poll()
        for fd in {0, program.process, program.mark, *program.read_ends} - {-1}:
            poll.register(fd, select.POLLIN)
        poll.register(program.input, select.POLLOUT)
        began = looked = time.monotonic()
        cpu_s = self._used()["cpu_s"]
        while True:
            ready = dict(poll.poll(TICK_S * 1000))
            if 0 in ready:  # nothing is asked while a program runs: this is the end of stdin
                self.leave()
            for fd in ready.keys() & program.outputs.keys():
                if not program.outputs[fd].read(fd):
                    poll.unregister(fd)
            if program.input in ready:
                fd = program.input
                if not program.feed():
                    poll.unregister(fd)
            now = time.monotonic()
            mark = os.read(program.mark, 1) if program.mark in ready else b""
            if program.mark in ready and not mark:
                poll.unregister(program.mark)  # the cell closed it: it would be ready for ever
            if mark:
                self._signal(signal.SIGSTOP)  # until the next cell: nobody looks at it meanwhile
                limit = self._reached(cpu_s, now - began)
                return limit, b"" if limit else mark, now - began
            if program.process in ready:
                return "", b"", now - began
            if now - began >= timeout_s:
                return "time", b"", now - began
            if now - looked >= TICK_S:
                looked = now
                if limit := self._reached(cpu_s, now - began):
                    return limit, b"", now - began

    def _reached(self, before_s: float, elapsed_s: float) -> str:
        """The limit that the processes have reached, "" where none."""
        self._reap()
        limits, used = self._limits, self._used()
        if used["processes"] > limits["processes"]:
            return "processes"
        if used["memory"] >= limits["memory"]:
            return "memory"
        if used["files"] >= limits["files"]:
            return "files"
        most_s = limits["cpus"] * elapsed_s + SPARE_CPU_S
        return "cpu" if used["cpu_s"] - before_s >= most_s else ""

    def _used(self) -> dict[str, float]:
        ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = {"processes": 0.0, "memory": 0.0, "files": 0.0}
        used["cpu_s"] = reaped.ru_utime + reaped.ru_stime
        for fields in self._others().values():
            used["processes"] += int(fields[17])  # threads
            used["memory"] += int(fields[21]) * page
            used["cpu_s"] += sum(map(int, fields[11:15])) / ticks
        for folder in (".", "/dev/shm", *self._limits["places"]) if self._confined else ():
            disk = os.statvfs(folder)
            used["memory"] += (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            used["files"] += disk.f_files - disk.f_ffree
        return used

    def _others(self) -> dict[int, list[bytes]]:
        """Processes of the sandbox but this one -> what /proc/PID/stat says from `state` on."""
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    found[int(name)] = file.read().rpartition(b")")[2].split()
        if self._confined:
            return found
        below, size = {os.getpid()}, 0
        while size != (size := len(below)):
            below |= {pid for pid, fields in found.items() if int(fields[1]) in below}
        return {pid: fields for pid, fields in found.items() if pid in below}

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._ended[ended[0]] = ended[1]

    def end_all(self) -> None:
        """Kills every process of the sandbox but this one, and waits until they are gone."""
        until = time.monotonic() + SETTLE_S
        self._reap()
        while self._others():
            if time.monotonic() > until:
                os._exit(1)  # the kernel holds one: the namespace ends with this process
            self._signal(signal.SIGKILL)
            self._reap()
            time.sleep(0.001)

    def _signal(self, number: signal.Signals) -> None:
        """To every process of the sandbox but this one."""
        for pid in [-1] if self._confined else self._others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def leave(self) -> None:
        """Ends all, and this process."""
        self.end_all()
        os._exit(0)


def _at_most(kind: int, wanted: int) -> int:
    """What is wanted, or the limit that this process is under already."""
    hard = resource.getrlimit(kind)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def prepare(uid: int | None, confined: bool) -> None:
    """Gives up the rights of root, and lets nobody look into this process. Unconfined, it lives
    until it has ended its programs."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, programs go before the training does
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    library = ctypes.CDLL(None)
    death = signal.SIGKILL if confined else 0
    for option, value in ((PDEATHSIG, death), (DUMPABLE, 0), (CHILD_SUBREAPER, 1)):
        library.prctl(option, value, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 gets no signal that it has no use for
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)


def main() -> None:
    settings = json.loads(sys.argv[1])
    os.chdir(settings["folder"])
    prepare(settings["uid"], settings["confined"])
    os.makedirs("tmp", exist_ok=True)
    limits = {**settings["limits"], "places": settings["places"]}
    supervisor = Supervisor(limits, settings["confined"])
    requests, answers = os.fdopen(0, "rb", closefd=False), os.fdopen(1, "wb", closefd=False)
    answers.write(b"ready\n")
    answers.flush()
    while line := requests.readline():
        request = json.loads(line)
        request["contents"] = [(name, requests.read(size)) for name, size in request["files"]]
        request["stdin"] = requests.read(request["stdin"])
        header, texts = supervisor.answer(request)
        header["sizes"] = [len(text) for text in texts]
        answers.write(json.dumps(header).encode() + b"\n" + b"".join(texts))
        answers.flush()
    supervisor.leave()


if __name__ == "__main__":
    main()
