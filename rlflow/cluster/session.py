"""Ray, started on this machine or joined on a cluster, and ended without a process left, whenever
a signal comes."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from rlflow.errors import ConfigError, MissingPackageError, RLFlowError, install_command
from rlflow.storage.child import Guard
from rlflow.storage.daemon import start_daemon
from rlflow.storage.guard import marked

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MARK = "RLFLOW_RAY"
"""A variable of Ray's processes, where Ray was started here."""
PROBE_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 60.0
HTTP2_SETTINGS = (
    b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # an empty frame: length, type 4, flags, stream
)
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS
WATCH_INTERVAL_S = 0.2
STOP_TIMEOUT_S = 5.0  # for Ray's processes to end by themselves
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
LOCAL_ONLY = {
    # Makes Ray's own servers listen on the loopback only: it resolves 127.0.0.1 to the machine's
    # address otherwise. Its processes read this, and this process where it has not imported ray yet
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "SPT_NOENV": "1",  # Ray's agents keep their environment, with our mark, beside a longer title
}


class RaySession:
    """A connection to Ray that is ours to end, and the processes that came with it, which carry its
    mark in their environment."""

    def __init__(self, mark: str = "") -> None:
        """mark: the value of MARK; none for a cluster that is joined: nothing is started here that
        would have to end."""
        self.mark = mark
        self._guard: Guard | None = None
        self._ended = threading.Event()

    def start(self, initialize: Callable[[], object]) -> Future[None]:
        """Calls `initialize` in a thread that stays until the session or the program ends, after
        its exit handlers.

        Ray's servers ask the kernel to be killed with their parent (PR_SET_PDEATHSIG), and that is
        the thread which started them, not the process: with it gone, Ray would be too, and its
        agents left behind."""
        self._guard = Guard(f"{MARK}={self.mark}") if self.mark else None
        started: Future[None] = Future()

        def hold() -> None:
            try:
                initialize()
                started.set_result(None)
            except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
                started.set_exception(error)
            self._ended.wait()

        start_daemon("ray", hold)
        return started

    def close(self) -> None:
        """Leaves Ray; where it was started here, waits until its processes have ended, and ends
        those that have not."""
        import ray

        ray.shutdown()
        until = time.monotonic() + STOP_TIMEOUT_S
        while self.mark and (left := list(marked(f"{MARK}={self.mark}"))):
            if time.monotonic() > until:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        if self._guard is not None:
            self._guard.close()
        self.abandon()

    def abandon(self) -> None:
        """Lets go of a cluster that is still being joined, and gives SIGTERM back."""
        self._ended.set()
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is _exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def connect(
    address: str | None, cpus: int, options: Mapping[str, Any] | None = None
) -> RaySession | None:
    """Connects to Ray; None where it was connected before, so that it is not for the caller to
    disconnect.

    Sends no telemetry, opens no dashboard, logs errors only. options: of ray.init, for a Ray that
    is started here. Raises MissingPackageError without Ray, ConfigError where no cluster answers at
    `address`, RLFlowError where Ray does not start here."""
    session = RaySession("" if address else f"{os.getpid()}-{secrets.token_hex(8)}")
    local = {} if address else {MARK: session.mark, **LOCAL_ONLY}
    with _environment({**QUIET, **local}, {"OMP_WAIT_POLICY": "passive"}):
        try:
            import ray
        except ImportError as error:
            raise MissingPackageError(
                f"cluster.ranks and rollout_workers need Ray: {install_command('ray')}, or set "
                "them to 0"
            ) from error
        if ray.is_initialized():
            return None
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address is None:
            quiet |= {"include_dashboard": False, "_node_ip_address": LOOPBACK, "address": "local"}
            quiet |= {"num_cpus": max(cpus, os.cpu_count() or 1), **(options or {})}
            return _start(session, partial(_start_local, quiet))
        try:
            _probe(address)
            return _start(session, partial(_join, address, quiet), JOIN_TIMEOUT_S)
        # Ray's own are RuntimeErrors
        except (OSError, ValueError, RuntimeError, RLFlowError) as error:
            raise ConfigError(
                f"cluster.address: no Ray cluster answers at '{address}': {first_line(error)}; "
                "start one with `ray start --head`, and give every machine the token of the first, "
                "~/.ray/auth_token, where it has one"
            ) from error


def _start_local(options: dict[str, Any]) -> None:
    """Starts Ray, which listens on the loopback, also where a script has imported ray before: of
    LOCAL_ONLY it has read nothing then."""
    import ray
    from ray._private import ray_constants

    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)
    if before is None:
        logger.warning("cluster: this Ray listens on all addresses, guarded by its token alone")
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        ray.init(**options)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _join(address: str, options: dict[str, Any]) -> None:
    """Joins a cluster, with this user's token where there is one, as `ray start` guards its cluster
    with it. Ray itself looks for the token only where the address is "auto"; a cluster without a
    token takes who brings one."""
    import ray

    with contextlib.suppress(ImportError):  # a Ray without tokens
        from ray._private.authentication import authentication_token_setup as tokens

        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    ray.init(address=address, **options)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")


def _start(
    session: RaySession, initialize: Callable[[], object], join_timeout_s: float | None = None
) -> RaySession:
    """Starts Ray, or joins a cluster, in a thread: a signal in the middle of ray.init would leave
    Ray's servers behind.

    A signal's exception is raised when Ray is up, and down again. ray.init in the main thread would
    also replace the caller's handler of SIGTERM; where there is none, one is set that lets Ray's
    processes end with the program.

    join_timeout_s: for joining a cluster; nothing is left behind then, so a signal ends it at once.
    Raises RLFlowError for whatever goes wrong in `initialize`, and where joining takes longer."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it sets no handler
    try:
        return _started(session, session.start(initialize), join_timeout_s)
    except BaseException:
        session.abandon()
        raise


def _started(
    session: RaySession, starting: Future[None], join_timeout_s: float | None
) -> RaySession:
    interruption: BaseException | None = None
    deadline = time.monotonic() + (join_timeout_s or float("inf"))
    while not starting.done():
        try:
            wait([starting], timeout=WATCH_INTERVAL_S)
            _take_signals_back()
        except (KeyboardInterrupt, SystemExit) as stop:
            if join_timeout_s is not None:
                raise
            interruption = interruption or stop
            # Ray's handler, if it was the first, aborts the process after 3 s
            signal.setitimer(signal.ITIMER_REAL, 0)
        if time.monotonic() > deadline and not starting.done():
            raise RLFlowError(f"no Ray cluster let this process join within {join_timeout_s:.0f} s")
    _take_signals_back()
    failure = interruption or starting.exception()
    if failure is not None:
        session.close()
        if isinstance(failure, Exception) and join_timeout_s is None:
            raise RLFlowError(
                f"cluster: Ray did not start: {type(failure).__name__}: {first_line(failure)}; its "
                "logs are in /tmp/ray/session_latest/logs. cluster.ranks=0 trains without Ray"
            ) from failure
        raise failure
    return session


def _take_signals_back() -> None:
    """Puts the caller's handlers of SIGINT and SIGTERM in front of those that Ray's library
    installs while it starts: these print a stack and abort the process after 3 s, too soon for a
    checkpoint."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler is not None:
                signal.signal(number, handler)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _probe(address: str) -> None:
    """Raises OSError where nothing listens at host:port, or what does is no gRPC server: Ray itself
    would try for minutes.

    An HTTP/2 server, as gRPC's, answers a client's preface with a SETTINGS frame (RFC 9113, section
    3.4)."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdecimal()):
        return
    place = (host.strip("[]"), int(port))
    with socket.create_connection(place, timeout=PROBE_TIMEOUT_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        connection.sendall(HTTP2_PREFACE)
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while len(answer) < len(HTTP2_SETTINGS) and (part := connection.recv(64)):
                answer += part
        if answer[3:4] != HTTP2_SETTINGS[3:4]:
            silent = f"it said nothing within {PROBE_TIMEOUT_S:.0f} s"
            found = f"it answered {answer[:16]!r}" if answer else silent
            raise OSError(f"what listens there is not Ray ({found})")


@contextlib.contextmanager
def _environment(values: dict[str, str], defaults: dict[str, str]) -> Iterator[None]:
    """Sets variables that Ray's processes inherit, `defaults` only where the user has set none;
    restores them after."""
    changed = {
        **{name: each for name, each in defaults.items() if name not in os.environ},
        **values,
    }
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
