"""Hostile programs, what must come of each, and a script that plays them: python hostile.py SECRET PORT

SECRET: a file that only the caller should know. PORT: where somebody listens on this machine. A line of JSON per program. A
program says LEFT where it got what it was after, and `refused` where it did not."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from rlflow_environments.sandbox import Confines, Limits, Sandbox, SandboxError

LIMITS = Limits(
    timeout_s=4.0, memory_mb=256, disk_mb=16, files=2_000, processes=16, output_bytes=4_000
)
TOOLS = """
import ctypes, glob, mmap, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def numbered(number, *arguments):
    call("syscall", number, *arguments)

def refused(what, *arguments):
    try:
        print("LEFT", what, arguments, what(*arguments), flush=True)
    except OSError:
        print("refused", flush=True)

def read(path):
    return open(path, "rb").read(100)

def write(path):
    open(path, "wb").write(b"left")

def detached(function):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            function()
        os._exit(0)
"""


LEFT = "rm -f beat; sleep 0.05; ls beat /proc 2>/dev/null | grep -cE '^([0-9]+|beat)$'"


@dataclass(frozen=True)
class Hostile:
    """A program. says: what stands in its output. limit: that ends it. code: its exit code, where one must be. bash: a script."""

    name: str
    program: str
    says: str = ""
    limit: str = ""
    code: int | None = None
    bash: bool = False


PROGRAMS = [
    Hostile("fork bomb of bash", ":(){ :|:& };:; sleep 60", limit="processes", bash=True),
    Hostile(
        "fork bomb", "while True:\n    try: os.fork()\n    except OSError: pass", limit="processes"
    ),
    Hostile(
        "fork bomb that leaves its session",
        "while True:\n    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass",
        limit="processes",
    ),
    Hostile(
        "threads",
        "while True:\n    try: threading.Thread(target=time.sleep, args=(60,)).start()\n    except RuntimeError: pass",
        limit="processes",
    ),
    Hostile("memory", "kept = []\nwhile True: kept.append(b'x' * (1 << 20))", limit="memory"),
    Hostile(
        "memory of ten processes",
        "for _ in range(10):\n    if os.fork() == 0:\n        kept = b'x' * (60 << 20)\n"
        "        time.sleep(60)\ntime.sleep(60)",
        limit="memory",
    ),
    Hostile(
        "memory that is shared",
        "kept = mmap.mmap(-1, 1 << 30)\nfor _ in range(1 << 10): kept.write(bytes(1 << 20))",
        limit="memory",
    ),
    Hostile(
        "address space", "try: bytearray(1 << 40)\nexcept MemoryError: print('refused')", "refused"
    ),
    Hostile(
        "memory of no process",
        "refused(numbered, 319, b'x', 0)\nrefused(numbered, 29, 1, 1 << 30, 0o1777)\n"
        "refused(numbered, 64, 0, 32000, 0o1600)\nrefused(numbered, 68, 0, 0o1600)",
        "refused\n" * 4,
    ),
    Hostile("disk", "refused(lambda: open('f', 'wb').write(bytes(1 << 30)))", "refused"),
    Hostile(
        "disk of shared memory",
        "refused(lambda: open('/dev/shm/f', 'wb').write(bytes(1 << 26)))",
        "refused",
    ),
    Hostile("files", "for i in range(10 ** 9): open(str(i), 'w')", limit="files"),
    Hostile("nested folders", "while True: os.mkdir('d'); os.chdir('d')", limit="files"),
    Hostile(
        "open files",
        "kept = []\nrefused(lambda: [kept.append(open('/dev/null')) for _ in range(10 ** 6)])",
        "refused",
    ),
    Hostile(
        "a gigabyte of output",
        "for _ in range(1 << 10): os.write(1, bytes(1 << 20))\nos.write(1, b'done')",
        "done",
        code=0,
    ),
    Hostile("output without end", "while True: os.write(2, b'x' * 65536)", limit="time"),
    Hostile("lines without end", "yes", limit="time", bash=True),
    Hostile("no end", "while True: pass", limit="time"),
    Hostile("sleeps", "time.sleep(10 ** 6)", limit="time"),
    Hostile(
        "ignores every signal",
        "for n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        limit="time",
    ),
    Hostile("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", limit="time"),
    Hostile("closes its output and runs on", "os.closerange(0, 3)\ntime.sleep(60)", limit="time"),
    Hostile(
        "all processors",
        "for _ in range(8):\n    if os.fork() == 0: break\nwhile True: pass",
        limit="cpu or time",
    ),
    Hostile(
        "a daemon",
        "def run():\n    while True: write('beat'); time.sleep(0.01)\ndetached(run)\nprint('gone')",
        "gone",
        code=0,
    ),
    Hostile(
        "a daemon that holds its output",
        "detached(lambda: time.sleep(60))\nprint('gone')",
        "gone",
        code=0,
    ),
    Hostile(
        "zombies",
        "for _ in range(8):\n    if os.fork() == 0: os._exit(0)\nprint('gone')",
        "gone",
        code=0,
    ),
    Hostile(
        "kills its parent",
        "for n in (9, 15, 2, 1, 19): os.kill(os.getppid(), n)\nos.kill(1, 9)\nprint('alive')",
        "alive",
        code=0,
    ),
    Hostile("kills everybody", "kill -9 -1", bash=True),
    Hostile(
        "the secret",
        "refused(read, SECRET)\nrefused(read, '/box/../..' + SECRET)",
        "refused\nrefused",
    ),
    Hostile(
        "the secret by a link",
        "os.symlink(SECRET, 'link')\nrefused(read, 'link')\nrefused(write, 'link')",
        "refused\nrefused",
    ),
    Hostile(
        "home and passwords",
        f"for p in ('/etc/shadow', '/etc/passwd', {os.path.expanduser('~/.bashrc')!r}, '/var/log/dpkg.log'):\n"
        "    refused(read, p)",
        "refused\n" * 4,
    ),
    Hostile(
        "its own environment",
        "print('LEFT' if 'HOSTILE_SECRET' in os.environ else 'nothing')\nrefused(read, '/proc/1/environ')",
        "nothing\nrefused",
    ),
    Hostile(
        "the first process",
        "for p in ('mem', 'fd/0', 'fd/1', 'maps', 'environ', 'root/etc', 'cwd/x'):\n"
        "    refused(read, '/proc/1/' + p)\nrefused(write, '/proc/1/fd/1')\nrefused(os.listdir, '/proc/1/fd')",
        "refused\n" * 9,
    ),
    Hostile(
        "other processes",
        "found = [p for p in os.listdir('/proc') if p.isdigit()]\n"
        "print('LEFT' if len(found) > 2 else 'alone', len(found))",
        "alone",
    ),
    Hostile(
        "writes outside",
        "for p in ('/x', '/usr/x', '/usr/bin/x', '/etc/x', '/run/x', '/run/supervisor.py', '/dev/x', '/proc/x',\n"
        "          sys.prefix + '/x', SECRET): refused(write, p)",
        "refused\n" * 10,
    ),
    Hostile(
        "removes everything",
        "rm -rf /box/* /etc /usr/bin 2>/dev/null; ls /usr/bin/env",
        "/usr/bin/env",
        bash=True,
    ),
    Hostile(
        "settings of the kernel",
        "for p in ('/proc/sys/kernel/hostname', '/proc/sysrq-trigger', '/proc/sys/vm/drop_caches',\n"
        "          '/proc/1/oom_score_adj', '/sys/power/state'): refused(write, p)",
        "refused\n" * 5,
    ),
    Hostile(
        "network",
        "refused(socket.create_connection, ('127.0.0.1', PORT), 2)\n"
        "print(sorted(name for _, name in socket.if_nameindex()))",
        "refused\n['lo']",
    ),
    Hostile(
        "raw sockets",
        "refused(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)\n"
        "refused(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)",
        "refused\nrefused",
    ),
    Hostile(
        "sockets of the machine",
        "other = socket.socket(socket.AF_UNIX)\nrefused(other.connect, '\\0rlflow-' + str(PORT))\n"
        "refused(other.connect, SECRET + '.socket')\nprint(glob.glob('/run/*'))",
        "refused\nrefused",
    ),
    Hostile(
        "debugs the first process",
        "refused(numbered, 101, 16, 1, 0, 0)\nrefused(numbered, 311, 1, 0, 0, 0, 0, 0)",
        "refused\nrefused",
    ),
    Hostile(
        "its limits and the first process's",
        "refused(numbered, 302, 1, 7, 0, ctypes.byref((ctypes.c_long * 2)()))\n"
        "try: resource.setrlimit(resource.RLIMIT_NPROC, (999, 999)); print('LEFT')\nexcept ValueError: print('refused')",
        "refused\nrefused",
    ),
    Hostile(
        "mounts",
        "refused(call, 'mount', b'tmpfs', b'/box', b'tmpfs', 0, None)\nrefused(call, 'umount2', b'/box', 2)\n"
        "refused(numbered, 155, b'/box', b'/box')\nrefused(os.chroot, '/box')",
        "refused\n" * 4,
    ),
    Hostile(
        "namespaces",
        "refused(call, 'unshare', 0x10000000)\nrefused(call, 'unshare', 0x20000)\n"
        "refused(numbered, 56, 0x10000000 | 17, 0, 0, 0, 0)",
        "refused\n" * 3,
    ),
    Hostile(
        "device nodes",
        "import stat\nrefused(os.mknod, 'sda', stat.S_IFBLK | 0o666, os.makedev(8, 0))\n"
        "refused(os.mknod, 'mem', stat.S_IFCHR | 0o666, os.makedev(1, 1))\nrefused(read, '/dev/sda')\nrefused(read, '/dev/kmsg')",
        "refused\n" * 4,
    ),
    Hostile(
        "root",
        "refused(os.setuid, 0)\nrefused(os.setgroups, [0])\nrefused(os.chown, '/box', 0, 0) if os.getuid() else None\n"
        "os.chmod('program.py', 0o6777)\nprint(open('/proc/self/status').read().split('CapEff:')[1].split()[0])",
        "refused\nrefused\nrefused\n0000000000000000",
    ),
    Hostile(
        "parts of the kernel",
        "for n in (321, 425, 323, 250, 298, 246, 175):\n    refused(numbered, n, 0, 0, 0, 0, 0)",
        "refused\n" * 7,
    ),
    Hostile(
        "priority",
        "refused(os.nice, -10)\nrefused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50))",
        "refused\nrefused",
    ),
    Hostile(
        "inherited descriptors",
        "found = os.listdir('/proc/self/fd')\nprint('LEFT' if len(found) > 4 else 'only its own')",
        "only its own",
    ),
    Hostile("the terminal", "refused(os.open, '/dev/tty', os.O_RDWR)", "refused"),
    Hostile(
        "a core", "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nctypes.string_at(0)", code=-11
    ),
    Hostile(
        "answers in place of the first process",
        'print(\'{"code": 0, "limit": ""}\', flush=True)\nos.write(1, b\'ready\\n\')\nos.kill(os.getpid(), 9)',
        '{"code": 0',
        code=-9,
    ),
]


async def play(hostile: Hostile, confines: Confines, given: str) -> dict[str, Any]:
    """How the program ended; whether the sandbox still worked, with nothing left in it; and seconds until all of it was gone."""
    began = time.monotonic()
    async with Sandbox(confines) as box:
        if hostile.bash:
            result = await box.bash(hostile.program)
        else:
            result = await box.python(f"{TOOLS}\n{given}\n{hostile.program}\n")
        took = time.monotonic() - began
        try:
            left = await box.run(["bash", "-c", LEFT])
            usable = left.output.strip()
        except SandboxError as error:
            usable = str(error)
    ended = {
        "name": hostile.name,
        "output": result.output,
        "code": result.code,
        "limit": result.limit,
    }
    return {
        **ended,
        "duration_s": result.duration_s,
        "took_s": took,
        "all_s": time.monotonic() - began,
        "usable": usable,
    }


async def play_all(secret: str, port: int) -> AsyncIterator[dict[str, Any]]:
    given = f"SECRET, PORT = {secret!r}, {port}"
    for hostile in PROGRAMS:
        yield await play(hostile, Confines(LIMITS), given)


async def main() -> None:
    os.environ["HOSTILE_SECRET"] = "secret"
    async for played in play_all(sys.argv[1], int(sys.argv[2])):
        print(json.dumps(played), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
