"""Refuse the system calls that reach what namespaces and limits do not bound.

A filter of seccomp: a classic BPF program over the number of each call
(https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html).
"""

from __future__ import annotations

import errno
import struct

#: Per machine: its number for audit, and the numbers of the calls that fail with EPERM.
_REFUSED = {
    "x86_64": (
        0xC000003E,
        {
            "shmget": 29,  # memory that stays when nobody has it mapped, beyond RLIMIT_AS
            "semget": 64,
            "msgget": 68,
            "socket": 41,  # AF_VSOCK and others that no network namespace holds
            "ptrace": 101,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "unshare": 272,
            "setns": 308,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "bpf": 321,
            "perf_event_open": 298,
            "userfaultfd": 323,
            "io_uring_setup": 425,  # does what the calls above do, unseen by a filter
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "shmget": 194,
            "semget": 190,
            "msgget": 186,
            "socket": 198,
            "ptrace": 117,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "unshare": 97,
            "setns": 268,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "bpf": 280,
            "perf_event_open": 241,
            "userfaultfd": 282,
            "io_uring_setup": 425,
        },
    ),
}
MACHINES = tuple(_REFUSED)
"""Machines, as ``platform.machine`` names them, whose calls are known."""

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_KILL, _ALLOW, _EPERM = 0x80000000, 0x7FFF0000, 0x00050000 | errno.EPERM
_NUMBER, _MACHINE = 0, 4  # offsets in what a filter sees of a call
_X32 = 0x40000000  # from here on, the same calls of x86_64 under other numbers


def call_filter(machine: str) -> bytes:
    """Return the filter for one of :data:`MACHINES`, as bubblewrap's ``--seccomp`` reads it."""
    audit, refused = _REFUSED[machine]
    steps = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in refused.values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
