"""The system calls that a confined program may not make, as a seccomp filter.

They are those that reach into other processes, load code into the kernel, open namespaces, or keep
memory that belongs to no process. Sockets are of listed families alone: a network namespace keeps
programs from those, and of the others (VSOCK for one) it does not. Numbers are of x86-64 (arch/x86/entry/syscalls/syscall_64.tbl);
the machine's instructions are of linux/bpf_common.h and linux/seccomp.h."""

from __future__ import annotations

DENIED = """
    shmget 29, semget 64, msgget 68, ptrace 101, syslog 103, pivot_root 155, chroot 161, acct 163,
    mount 165, umount2 166, swapon 167, reboot 169, init_module 175, delete_module 176, quotactl
    179, mq_open 240, kexec_load 246, add_key 248, request_key 249, keyctl 250, unshare 272,
    perf_event_open 298, name_to_handle_at 303, open_by_handle_at 304, setns 308, process_vm_readv
    310, process_vm_writev 311, finit_module 313, memfd_create 319, kexec_file_load 320, bpf 321,
    userfaultfd 323, io_uring_setup 425, io_uring_enter 426, io_uring_register 427, open_tree 428,
    move_mount 429, fsopen 430, fsconfig 431, fsmount 432, fspick 433, mount_setattr 442,
    memfd_secret 447
"""
"""Names and numbers."""
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6 (linux/socket.h)."""
NETLINK, ROUTE = 16, 0
"""AF_NETLINK, which lists the interfaces as NETLINK_ROUTE."""
SOCKET, SOCKETPAIR = 41, 53
CLONE, CLONE3, PRLIMIT = 56, 435, 302
NEW_USER_NAMESPACE = 0x10000000
X86_64, X32 = 0xC000003E, 0x40000000
LOAD, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, THIRD_ARGUMENT = (
    0,
    4,
    16,
    32,
)  # offsets in struct seccomp_data
ALLOW, KILL, NOT_PERMITTED, NOT_THERE = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
NO_SUCH_FAMILY = 0x50061


def system_call_filter() -> bytes:
    """The filter in the kernel's form. clone3 is said not to be there, as its flags cannot be
    read: the C library then takes clone."""
    steps = [
        _step(LOAD, ARCHITECTURE),
        _step(IF_EQUAL, X86_64, 1, 0),
        _step(ANSWER, KILL),
        _step(LOAD, NUMBER),
        _step(IF_AT_LEAST, X32, 0, 1),
        _step(ANSWER, NOT_PERMITTED),
    ]
    for call in DENIED.split(","):
        steps += [_step(IF_EQUAL, int(call.split()[1]), 0, 1), _step(ANSWER, NOT_PERMITTED)]
    steps += [_step(IF_EQUAL, CLONE3, 0, 1), _step(ANSWER, NOT_THERE)]
    steps += _by_first_argument(CLONE, _step(IF_ANY_BIT, NEW_USER_NAMESPACE, 0, 1))
    steps += _by_first_argument(PRLIMIT, _step(IF_EQUAL, 0, 1, 0))  # 0: the caller's own limits
    for number in (SOCKET, SOCKETPAIR):
        steps += _of_listed_families(number)
    return b"".join([*steps, _step(ANSWER, ALLOW)])


def _step(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return code.to_bytes(2, "little") + bytes([if_true, if_false]) + operand.to_bytes(4, "little")


def _by_first_argument(number: int, test: bytes) -> list[bytes]:
    """Refuses the call where the test goes on to the next step, allows it where it skips one."""
    argument, refused = _step(LOAD, FIRST_ARGUMENT), _step(ANSWER, NOT_PERMITTED)
    return [_step(IF_EQUAL, number, 0, 4), argument, test, refused, _step(ANSWER, ALLOW)]


def _of_listed_families(number: int) -> list[bytes]:
    """Allows the call where its first argument is a listed family, as the kernel reads it: 32
    bits."""
    allowed = len(FAMILIES) + 5  # the last step
    tests = [_step(IF_EQUAL, family, allowed - at - 1) for at, family in enumerate(FAMILIES, 1)]
    steps = [
        _step(LOAD, FIRST_ARGUMENT),
        *tests,
        _step(IF_EQUAL, NETLINK, 0, 2),
        _step(LOAD, THIRD_ARGUMENT),
        _step(IF_EQUAL, ROUTE, 1),
        _step(ANSWER, NO_SUCH_FAMILY),
        _step(ANSWER, ALLOW),
    ]
    return [_step(IF_EQUAL, number, 0, len(steps)), *steps]
