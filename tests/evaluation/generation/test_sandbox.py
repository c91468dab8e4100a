"""Attacks on the sandbox: each test fails if what it attempts succeeds.

Where an attempt does no harm, it is also made outside, where it must succeed: an attempt that
always fails would prove nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.generation.sandbox import LIMITS, SPENT, Sandbox

# A number that is in the command line of every process of these tests and of no other's.
MARK = 2**20 + os.getpid()
SLEEP = "import time\ntime.sleep(600)"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox.open(cpu_seconds=1, file=MARK)
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file that every user may read, outside /tmp."""
    directory = Path(tempfile.mkdtemp(dir="/var/tmp"))
    directory.chmod(0o755)
    path = directory / "secret"
    path.write_text("the secret\n")
    path.chmod(0o644)
    yield path
    shutil.rmtree(directory)


def outside(script: str) -> str:
    """Return what a script prints outside the sandbox."""
    words = [sys.executable, "-c", script]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


def left() -> list[psutil.Process]:
    """Return the processes of these tests' sandboxes; any may have ended since."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(MARK) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def gone() -> bool:
    """Return whether the processes of these tests' sandboxes end without further ado."""
    return psutil.wait_procs(left(), timeout=10)[1] == []


def test_a_program_runs_and_its_output_and_status_are_known(sandbox: Sandbox) -> None:
    assert sandbox.run("print(6 * 7)") == (0, "42\n")
    assert sandbox.run("raise SystemExit(3)")[0] == 3
    assert sandbox.run("print(open('/given').read())", "é\0") == (0, "é\0\n")
    assert sandbox.description()["sandbox"] == "bubblewrap"
    assert sandbox.description()["limits"]["file"] == MARK


def test_the_network_is_not_there(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempt = f"""
import socket
try:
    socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 5)
    print("reached")
except OSError as error:
    print(error)
"""
        assert outside(attempt) == "reached\n"
        assert "reached" not in sandbox.run(attempt)[1]


READ = """
try:
    print(len(open({path!r}, "rb").read()) > 0)
except OSError as error:
    print(type(error).__name__)
"""


def test_neither_checkout_nor_home_nor_system_can_be_read(sandbox: Sandbox, secret: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=Path.home()) as at_home:
        at_home.write(b"secret")
        at_home.flush()
        Path(at_home.name).chmod(0o644)
        paths = [secret, at_home.name, __file__, "/etc/passwd", "/proc/self/environ", "/bin/sh"]
        paths += [sys.prefix + "/pyvenv.cfg", Path(psutil.__file__)]
        for path in map(str, paths):
            if Path(path).exists():
                assert outside(READ.format(path=path)) == "True\n", path
            assert sandbox.run(READ.format(path=path))[1] == "FileNotFoundError\n", path


WRITE = """
import os
ways = {{
    "file": lambda path: os.close(os.open(path, os.O_CREAT | os.O_WRONLY)),
    "unnamed file": lambda path: os.close(os.open(place, os.O_TMPFILE | os.O_WRONLY)),
    "directory": os.mkdir,
    "symbolic link": lambda path: os.symlink("/given", path),
    "hard link": lambda path: os.link({existing!r}, path),
    "pipe": os.mkfifo,
}}
for place in {places!r} or ["/", *(os.path.join("/", name) for name in os.listdir("/"))]:
    for name, make in ways.items():
        try:
            make(os.path.join(place, name))
            print(place, name)
        except OSError:
            pass
"""
CHANGE = """
for path in {paths!r}:
    try:
        open(path, "a")
        print(path)
    except OSError:
        pass
"""


def test_nothing_can_be_made_or_changed(sandbox: Sandbox, secret: Path) -> None:
    """A place to write would bound bytes, but not the number of files, which take memory, too."""
    possible = outside(WRITE.format(places=[str(secret.parent)], existing=str(secret)))
    assert len(possible.splitlines()) == 6
    places = ["/", "/usr", "/usr/lib", "/etc", "/dev", "/tmp", str(secret.parent), str(Path.cwd())]
    for several in (places, []):
        attempt = WRITE.format(places=several, existing="/given")
        assert sandbox.run(attempt) == (0, "")
    change = CHANGE.format(paths=["/script.py", "/given", str(sandbox.python), str(secret)])
    assert str(secret) in outside(change)
    assert sandbox.run(change) == (0, "")


def test_the_environment_is_empty(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPMOE_TEST_SECRET", "secret value")
    attempt = "import os\nprint(sorted(os.environ))"
    assert "CAPMOE_TEST_SECRET" in outside(attempt)
    assert sandbox.run(attempt)[1] == "['LC_CTYPE', 'PWD', 'PYTHONHASHSEED']\n"
    for pid in ("self", 1, os.getpid()):
        read = READ.format(path=f"/proc/{pid}/environ")
        assert sandbox.run(read)[1] == "FileNotFoundError\n"


LIBC = "import ctypes, errno, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
REFUSED = f"{LIBC}print({{}}, ctypes.get_errno() == errno.EPERM)"
SOCKET = "import socket\ntry:\n    socket.socket(socket.{}, socket.SOCK_RAW)\n"
SOCKET += "except PermissionError:\n    print('refused')"
# What a program prints where it is refused what it asks for.
ATTEMPTS = {
    **{
        family: (SOCKET.format(family), "refused\n")
        for family in ("AF_INET", "AF_UNIX", "AF_VSOCK", "AF_NETLINK")
    },
    **{
        call.partition("(")[0].removeprefix("libc."): (REFUSED.format(call), "-1 True\n")
        for call in (
            "libc.ptrace(16, 1, 0, 0)",
            "libc.process_vm_readv(1, 0, 0, 0, 0, 0)",
            "libc.shmget(0, ctypes.c_size_t(1 << 33), 0o1600)",
            "libc.unshare(0x10000000)",
            "libc.syscall(425, 8, 0)",  # io_uring_setup
        )
    },
    "mount": (f"{LIBC}print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))", "-1\n"),
    "a further user namespace": (
        f"{LIBC}x86 = {os.uname().machine == 'x86_64'}\n"
        "print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) if x86 else -1)",
        "-1\n",
    ),
    "an inherited file or a terminal": (
        "import os\nfor place in (*range(3, 60), '/dev/tty'):\n    try:\n"
        "        os.stat(place)\n        print(place)\n    except OSError:\n        pass",
        "",
    ),
    # Process 1 is the program, which takes no signal from inside.
    "processes outside": (
        "import os, signal\nseen = []\n"
        f"for pid in [*range(1, 10_000), {os.getpid()}, {os.getppid()}]:\n"
        "    try:\n        os.kill(pid, 0)\n        seen.append(pid)\n"
        "    except OSError:\n        pass\nprint(seen)\n"
        f"for target in (os.getppid(), 1, -1, {os.getpid()}):\n"
        "    try:\n        os.kill(target, signal.SIGKILL) if target else None\n"
        "    except OSError:\n        pass\nprint('still here')",
        "[1]\nstill here\n",
    ),
    "open files": (
        "opened = []\ntry:\n    while True:\n        opened.append(open('/dev/null'))\n"
        "except OSError as error:\n    print(error.strerror)",
        "Too many open files\n",
    ),
    "800 MB": (
        "try:\n    bytearray(800 * 2**20)\nexcept MemoryError:\n    print('refused')",
        "refused\n",
    ),
    "a file without a name": (
        "import os\ntry:\n    os.memfd_create('file')\nexcept OSError:\n    print('refused')",
        "refused\n",
    ),
    "shared memory": (
        "import mmap\ntry:\n    mmap.mmap(-1, 2**20)\nexcept OSError:\n    print('refused')",
        "refused\n",
    ),
    # Not refused, so that the rows above say something.
    "100 MB": ("print(len(bytearray(100 * 2**20)))", f"{100 * 2**20}\n"),
    "memory of its own": (
        "import mmap\nprint(len(mmap.mmap(-1, 2**20, flags=mmap.MAP_PRIVATE)))",
        f"{2**20}\n",
    ),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_what_is_beyond_the_limits_is_refused(sandbox: Sandbox, attempt: str) -> None:
    script, output = ATTEMPTS[attempt]
    with Path(__file__).open() as file:
        os.set_inheritable(file.fileno(), True)
        assert sandbox.run(script) == (0, output)


FORKS = """
import os, time
count = 0
try:
    while True:
        if not os.fork():
            time.sleep(60)
        count += 1
except OSError:
    print(count)
"""
THREADS = """
import threading, time
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError:
    print(threading.active_count())
"""


def test_forks_and_threads_are_bounded(sandbox: Sandbox) -> None:
    assert int(sandbox.run(FORKS)[1]) <= LIMITS["processes"] - 1
    assert int(sandbox.run(THREADS)[1]) <= LIMITS["processes"]
    assert gone()


def test_endless_output_is_cut(sandbox: Sandbox) -> None:
    status, output = sandbox.run("while True:\n    print('x' * 1000)")
    assert status
    assert 2**19 < len(output) <= MARK


LOOP = "while True:\n    pass"
# Uses as much processor time as it says, however long the machine takes to give it.
WORK = "import time\nwhile time.process_time() < 2.5:\n    pass\nprint('done')"
DEAF = f"import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n{LOOP}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "script", "end"),
    [
        ({"cpu_seconds": 1}, LOOP, (SPENT, "")),
        ({"cpu_seconds": 1}, DEAF, (SPENT, "")),
        ({"wall_seconds": 3}, f"print('waits', flush=True)\n{SLEEP}", (None, "waits\n")),
        ({"cpu_seconds": 3}, WORK, (0, "done\n")),
    ],
)
def test_a_run_ends_by_its_processor_time_or_by_the_clock_where_it_waits(
    sandbox: Sandbox, limits: dict[str, int], script: str, end: tuple[int | None, str]
) -> None:
    limited = dataclasses.replace(sandbox, limits={**LIMITS, **limits, "file": MARK})
    assert limited.run(script) == end
    assert gone()


DAEMON = """
import os, signal, time
if not os.fork():
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, 3)
    time.sleep(600)
"""


def test_no_process_stays_behind(sandbox: Sandbox) -> None:
    with sandbox.started(DAEMON + "time.sleep(600)") as process:
        while len(left()) < 3:  # one of bubblewrap, two of the program
            assert process.poll() is None
    assert gone()
    assert sandbox.run(DAEMON + "print('left')")[1] == "left\n"
    assert gone()


def test_programs_end_with_a_process_that_is_killed(sandbox: Sandbox) -> None:
    limits = f"file={MARK}, wall_seconds=500"
    script = "from capmoe_eval.evaluation.generation.sandbox import Sandbox\n"
    script += f"Sandbox.open({limits}).run('import time; time.sleep(500)')"
    with subprocess.Popen([sys.executable, "-c", script]) as starting:
        while not left():
            assert starting.poll() is None
        starting.kill()
    assert gone()


FAKE = """#!/bin/sh
[ "$1" = --version ] && { echo bubblewrap 0.8.0; exit; }
echo bwrap: No permissions to create new namespace >&2
exit 1
"""


@pytest.mark.parametrize(
    ("program", "machine", "line"),
    [
        (None, None, r"not installed; apt install bubblewrap$"),
        (FAKE, None, "No permissions to create new namespace"),
        (FAKE, "ppc64le", "x86_64 and aarch64, not of ppc64le"),
    ],
)
def test_where_there_can_be_no_sandbox_one_line_says_why(
    program: str | None,
    machine: str | None,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if program is not None:
        (tmp_path / "bwrap").write_text(program)
        (tmp_path / "bwrap").chmod(0o755)
        # Where root becomes nobody to start it, nobody has to find it.
        monkeypatch.setattr("os.getuid", lambda: 1000)
    if machine is not None:
        monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if program else str(tmp_path))
    with pytest.raises(UsageError, match=line) as refused:
        Sandbox.open()
    assert "\n" not in str(refused.value)
