"""Ray, started on this machine or joined on a cluster, and ended without a process left, whenever a signal comes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import psutil

from rlflow.cluster.guard import Guard
from rlflow.errors import ConfigError, MissingPackageError, RLFlowError, install_command

LOOPBACK = "127.0.0.1"
PROBE_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 60.0
HTTP2_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # an empty frame: length, type 4, flags, stream
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS
WATCH_INTERVAL_S = 0.2
STOP_TIMEOUT_S = 5.0  # for Ray's processes to end by themselves
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
# Makes Ray's own servers listen on the loopback only: it resolves 127.0.0.1 to the machine's address otherwise. Ray
# reads this when it is imported, so a caller who imports ray first gets all interfaces, guarded by Ray's token alone.
LOCAL_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class RaySession:
    """A connection to Ray that is ours to end, and the processes that came with it: made just before Ray is started."""

    def __init__(self) -> None:
        self._earlier = {child.pid for child in psutil.Process().children()}
        self._family: dict[int, psutil.Process] = {}
        self._complete = False
        self._guard = Guard()
        self._ended = threading.Event()

    def start(self, initialize: Callable[[], object]) -> Future[None]:
        """Calls `initialize` in a thread that stays until the session or the program ends, after its exit handlers.

        Ray's servers ask the kernel to be killed with their parent (PR_SET_PDEATHSIG), and that is the thread which
        started them, not the process: with it gone, Ray would be too, and its agents left behind."""
        started: Future[None] = Future()

        def hold() -> None:
            try:
                initialize()
                started.set_result(None)
            except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
                started.set_exception(error)
            self._ended.wait()

        threading.Thread(target=hold, name="ray", daemon=True).start()
        return started

    def complete(self) -> None:
        """Ray is up: children of this process that come later are not Ray's."""
        self.watch()
        self._complete = True

    def watch(self) -> None:
        """Takes note of Ray's servers and of what they have started. Called often: whoever outlives its parent is not
        found any more."""
        for child in psutil.Process().children():
            if child.pid == self._guard.pid:
                continue
            if child.pid in self._family or (child.pid not in self._earlier and not self._complete):
                self._family.update({process.pid: process for process in (child, *_descendants(child))})
        self._guard.protect(self._family.values())

    def close(self) -> None:
        """Leaves Ray; where it was started here, waits until its processes have ended, and ends those that have not.

        Agents of Ray that are themselves still starting do not notice its end for a minute or two."""
        import ray

        self.watch()
        ray.shutdown()
        _, left = psutil.wait_procs(self._family.values(), timeout=STOP_TIMEOUT_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._guard.close()
        self._ended.set()

    def abandon(self) -> None:
        """Lets go of a cluster that is still being joined: nothing was started here that would have to end."""
        self._ended.set()


def connect(address: str | None, cpus: int) -> RaySession | None:
    """Connects to Ray; None where it was connected before, so that it is not for the caller to disconnect.

    Sends no telemetry, opens no dashboard, logs errors only.
    Raises MissingPackageError without Ray, ConfigError where no cluster answers at `address`, RLFlowError where Ray does not
    start here.
    """
    values = {**QUIET, **(LOCAL_ONLY if address is None else {})}
    with _environment(values, {"OMP_WAIT_POLICY": "passive"}):
        try:
            import ray
        except ImportError as error:
            told = f"cluster.ranks and rollout_workers need Ray: {install_command('ray')}, or set them to 0"
            raise MissingPackageError(told) from error
        if ray.is_initialized():
            return None
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            quiet |= {"include_dashboard": False, "_node_ip_address": LOOPBACK}
            return _start(partial(ray.init, address="local", num_cpus=max(cpus, os.cpu_count() or 1), **quiet))
        try:
            _probe(address)
            return _start(partial(_join, address, quiet), JOIN_TIMEOUT_S)
        except (OSError, ValueError, RuntimeError, RLFlowError) as error:  # Ray's own are RuntimeErrors
            raise ConfigError(
                f"cluster.address: no Ray cluster answers at '{address}': {first_line(error)}; start one with `ray start "
                "--head`, and give every machine the token of the first, ~/.ray/auth_token, where it has one"
            ) from error


def _join(address: str, options: dict[str, Any]) -> None:
    """Joins a cluster, with this user's token where there is one, as `ray start` guards its cluster with it. Ray itself looks for
    the token only where the address is "auto"; a cluster without a token takes who brings one."""
    import ray

    with contextlib.suppress(ImportError):  # a Ray without tokens
        from ray._private.authentication import authentication_token_setup as tokens

        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    ray.init(address=address, **options)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def _start(initialize: Callable[[], object], join_timeout_s: float | None = None) -> RaySession:
    """Starts Ray, or joins a cluster, in a thread: a signal in the middle of ray.init would leave Ray's servers behind.

    A signal's exception is raised when Ray is up, and down again. ray.init in the main thread would also replace the
    caller's handler of SIGTERM; where there is none, one is set that lets Ray's processes end with the program.

    join_timeout_s: for joining a cluster; nothing is left behind then, so a signal ends it at once.
    Raises RLFlowError for whatever goes wrong in `initialize`, and where joining takes longer."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it sets no handler
    session = RaySession()
    interruption: BaseException | None = None
    starting = session.start(initialize)
    deadline = time.monotonic() + (join_timeout_s or float("inf"))
    while not starting.done():
        try:
            wait([starting], timeout=WATCH_INTERVAL_S)
            _take_signals_back()
            session.watch()
        except (KeyboardInterrupt, SystemExit) as stop:
            if join_timeout_s is not None:
                session.abandon()
                raise
            interruption = interruption or stop
            signal.setitimer(signal.ITIMER_REAL, 0)  # Ray's handler, if it was the first, aborts the process after 3 s
        if time.monotonic() > deadline and not starting.done():
            session.abandon()
            raise RLFlowError(f"no Ray cluster let this process join within {join_timeout_s:.0f} s")
    _take_signals_back()
    session.complete()
    failure = interruption or starting.exception()
    if failure is not None:
        session.close()
        if isinstance(failure, Exception) and join_timeout_s is None:
            raise RLFlowError(
                f"cluster: Ray did not start: {type(failure).__name__}: {first_line(failure)}; its logs are in "
                "/tmp/ray/session_latest/logs. cluster.ranks=0 trains without Ray"
            ) from failure
        raise failure
    return session


def _take_signals_back() -> None:
    """Puts the caller's handlers of SIGINT and SIGTERM in front of those that Ray's library installs while it starts: these
    print a stack and abort the process after 3 s, too soon for a checkpoint."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler is not None:
                signal.signal(number, handler)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _probe(address: str) -> None:
    """Raises OSError where nothing listens at host:port, or what does is no gRPC server: Ray itself would try for minutes.

    An HTTP/2 server, as gRPC's, answers a client's preface with a SETTINGS frame (RFC 9113, section 3.4)."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            connection.sendall(HTTP2_PREFACE)
            answer = b""
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                while len(answer) < len(HTTP2_SETTINGS) and (part := connection.recv(64)):
                    answer += part
            if answer[3:4] != HTTP2_SETTINGS[3:4]:
                found = f"it answered {answer[:16]!r}" if answer else f"it said nothing within {PROBE_TIMEOUT_S:.0f} s"
                raise OSError(f"what listens there is not Ray ({found})")


@contextlib.contextmanager
def _environment(values: dict[str, str], defaults: dict[str, str]) -> Iterator[None]:
    """Sets variables that Ray's processes inherit, `defaults` only where the user has set none; restores them after."""
    changed = {**{name: value for name, value in defaults.items() if name not in os.environ}, **values}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
