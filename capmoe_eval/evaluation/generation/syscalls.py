"""Refuse the system calls that reach what namespaces and limits do not bound.

A filter of seccomp: a classic BPF program over the number of each call
(https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html).
"""

from __future__ import annotations

import errno
import mmap
import struct

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Each machine's number for audit."""
MACHINES = tuple(_AUDIT)
"""Machines, as ``platform.machine`` names them, whose calls are known."""

#: The calls that fail with EPERM, and their numbers on each of the machines.
_REFUSED = {
    # Memory that stays when it is not mapped, or only a page of it: beyond RLIMIT_AS.
    "shmget": (29, 194),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "semget": (64, 190),
    "msgget": (68, 186),
    "socket": (41, 198),  # AF_VSOCK and others that no network namespace holds
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),  # does what the calls above do, unseen by a filter
}

# So is memory without a file that processes share: a page of it keeps all of it.
_MAP = (9, 222)
_SHARED_MEMORY = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS

_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_KILL, _ALLOW, _EPERM = 0x80000000, 0x7FFF0000, 0x00050000 | errno.EPERM
_NUMBER, _MACHINE, _FLAGS = 0, 4, 40  # offsets in what a filter sees of a call; mmap's fourth
_X32 = 0x40000000  # from here on, the same calls of x86_64 under other numbers


def call_filter(machine: str) -> bytes:
    """Return the filter for one of :data:`MACHINES`, as bubblewrap's ``--seccomp`` reads it."""
    place = MACHINES.index(machine)
    steps = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for numbers in _REFUSED.values():
        steps += [(_EQUAL, 0, 1, numbers[place]), (_RETURN, 0, 0, _EPERM)]
    steps += [
        (_EQUAL, 0, 4, _MAP[place]),
        (_LOAD, 0, 0, _FLAGS),
        (_AND, 0, 0, _SHARED_MEMORY),
        (_EQUAL, 0, 1, _SHARED_MEMORY),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
