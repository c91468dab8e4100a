"""Right programs pass and wrong ones do not, and none reaches what is outside of its sandbox.

An attempt that does no harm is also made outside, where it must succeed: one that always fails
would prove nothing.
"""

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.generation import programs
from capmoe_eval.evaluation.generation.programs import judge

SLEEP = "import time\ntime.sleep(600)\n"


@pytest.fixture(autouse=True)
def bubblewrap() -> None:
    try:
        programs.sandbox()
    except UsageError as error:
        pytest.skip(str(error))


def processes(mark: str) -> list[int]:
    """Return the processes with a text in their command line, but for zombies."""
    numbers = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            is_zombie = "\nState:\tZ" in (place / "status").read_text()
            if mark.encode() in (place / "cmdline").read_bytes() and not is_zombie:
                numbers.append(int(place.name))
        except OSError:  # it has ended
            continue
    return numbers


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Limits that a test may set; the memory marks its sandboxes, none of which outlives it."""
    changed = {**programs.LIMITS, "cpu_seconds": 1, "memory": 2**29 + os.getpid()}
    monkeypatch.setattr(programs, "LIMITS", changed)
    programs.sandbox.cache_clear()
    yield changed
    programs.sandbox.cache_clear()
    end = time.monotonic() + 60  # on a loaded machine the kernel takes seconds
    while processes(str(changed["memory"])):
        assert time.monotonic() < end, "a process is left"


DOUBLE = "def double(x):\n{}\nassert double(21) == 42\nassert double('a') == 'aa'\n"
VERDICTS = {
    "    return x * 2\n": "passed",
    "    print('x', flush=True)\n    return x + x\n\nprint(input)\n": "passed",
    "    return 42\n": "failed",
    "    pass\n": "failed",
    "": "failed",
    "    return x *\n": "failed",
    "    return input()\n": "failed",
    "    return double(x)\n": "failed",
    "    return x * 2\n\nraise SystemExit\n": "failed",
    "    return x * 2\n\nimport os\nos._exit(0)\n": "failed",
    "    return 42 # \ud800\n": "failed",
    "    return 42 \0": "failed",
    "    return x * 2\n\nwhile True:\n    print('x' * 1000)\n": "out of time",
    "    import signal\n    signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n    while True:\n"
    "        pass\n": "out of time",
}


def test_verdicts(limits: dict[str, int]) -> None:
    verdicts = {completion: judge(DOUBLE.format(completion)) for completion in VERDICTS}
    assert verdicts == VERDICTS


def test_the_clock_ends_what_waits(limits: dict[str, int]) -> None:
    limits["wall_seconds"] = 1
    assert judge(f"import os\nos.fork()\n{SLEEP}") == "out of time"


def succeeds_outside(attempt: str) -> bool:
    return not subprocess.run(
        [sys.executable, "-c", attempt], check=False, capture_output=True, timeout=60
    ).returncode


WRITE = """
import os
for place in ["/", "/usr", "/usr/lib", "/etc", "/dev", "/tmp", ".", *{places!r}]:
    path = os.path.join(place, "made")
    for make in (
        lambda: open(path, "w"),
        lambda: os.open(place, os.O_TMPFILE | os.O_WRONLY),
        lambda: os.mkdir(path),
        lambda: os.symlink("/usr", path),
        lambda: os.mkfifo(path),
    ):
        try:
            make()
        except OSError:
            continue
        raise SystemExit(0)
raise ValueError("nothing can be made")
"""


def test_what_is_outside_can_be_neither_reached_nor_read_nor_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CAPMOE_TEST_SECRET", "secret value")
    write = WRITE.format(places=[str(tmp_path), str(Path.cwd())])
    attempts = [write, "import os\nassert 'CAPMOE_TEST_SECRET' in os.environ"]
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        tempfile.NamedTemporaryFile(dir="/var/tmp") as elsewhere,
        tempfile.NamedTemporaryFile(dir=Path.home()) as at_home,
    ):
        address = ("127.0.0.1", server.getsockname()[1])
        attempts.append(f"import socket\nsocket.create_connection({address}, 5)")
        Path(elsewhere.name).chmod(0o644)
        Path(at_home.name).chmod(0o644)
        paths = [elsewhere.name, at_home.name, __file__, "/etc/passwd", "/bin/sh"]
        paths += [f"{sys.prefix}/pyvenv.cfg", "/proc/self/environ"]
        attempts += [f"open({path!r}, 'rb').read()" for path in paths]
        for attempt in attempts:
            assert succeeds_outside(attempt), attempt
            assert judge(attempt) == "failed", attempt
    refused = write.replace("raise SystemExit(0)", "1 / 0").replace("raise ValueError", "str")
    assert judge(refused) == "passed", "each way was tried"


# A program passes where an attempt of these is refused; outside it would end with an error.
REFUSED = {
    "800 MB": "try:\n    bytearray(800 * 2**20)\nexcept MemoryError:\n    pass\nelse:\n    1 / 0",
    "processes": "import os\nchildren = []\ntry:\n    while len(children) < 9:\n"
    "        child = os.fork()\n        if not child:\n            import time\n"
    "            time.sleep(600)\n        children.append(child)\nexcept OSError:\n    pass\n"
    "assert len(children) < 3",
    "files": "import os\ntry:\n    for _ in range(200):\n        os.dup(0)\n"
    "except OSError:\n    pass\nelse:\n    1 / 0",
    "mount": "import ctypes\n"
    "assert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == -1",
    "a namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == -1",
    "an inherited file": "import os\nfor number in range(3, 64):\n    try:\n"
    "        os.fstat(number)\n    except OSError:\n        continue\n    1 / 0",
    "processes outside": "import os\nseen = []\n"
    f"for pid in [*range(1, 10_000), {os.getpid()}, {os.getppid()}]:\n"
    "    try:\n        os.kill(pid, 0)\n        seen.append(pid)\n"
    "    except OSError:\n        pass\nassert seen == [1]",
}


def test_what_is_beyond_the_limits_is_refused(limits: dict[str, int]) -> None:
    with Path(__file__).open() as file:
        os.set_inheritable(file.fileno(), True)
        verdicts = {attempt: judge(program) for attempt, program in REFUSED.items()}
    assert verdicts == dict.fromkeys(REFUSED, "passed")


def test_programs_end_with_a_process_that_is_killed(limits: dict[str, int]) -> None:
    judging = multiprocessing.get_context("fork").Process(target=judge, args=(SLEEP,))
    judging.start()
    while len(processes(str(limits["memory"]))) < 2:  # bubblewrap, and the program
        assert judging.is_alive()
        time.sleep(0.1)
    judging.kill()
    judging.join()


FAKE = """#!/bin/sh
[ "$1" = --version ] && { echo bubblewrap 0.8.0; exit; }
echo bwrap: No permissions to create new namespace >&2
exit 1
"""


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("", r"not installed; apt install bubblewrap$"),
        (FAKE, "No permissions to create new namespace"),
    ],
)
def test_where_there_can_be_no_sandbox_one_line_says_why(
    program: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if program:
        (tmp_path / "bwrap").write_text(program)
        (tmp_path / "bwrap").chmod(0o755)
        # Where root becomes nobody to start it, nobody has to find it.
        monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if program else str(tmp_path))
    programs.sandbox.cache_clear()
    with pytest.raises(UsageError, match=line) as refused:
        programs.sandbox()
    assert "\n" not in str(refused.value)
