"""Attacks on the sandbox: each test fails if what it attempts succeeds.

Where an attempt does no harm, it is also made outside, where it must succeed: an attempt that
always fails would prove nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.generation.limits import Limits
from capmoe_eval.evaluation.generation.sandbox import Finished, Sandbox

# A number that is in the command line of every process of these tests and of no other's.
MARK = 2**20 + os.getpid()
LIMITS = Limits(cpu_seconds=1, file=MARK)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox.open(LIMITS)
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
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def left() -> list[psutil.Process]:
    """Return the processes of these tests' sandboxes; any may have ended since."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(MARK) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def gone() -> bool:
    """Return whether the processes of these tests' sandboxes end without further ado."""
    return psutil.wait_procs(left(), timeout=10)[1] == []


def test_a_program_runs_and_its_output_and_status_are_known(sandbox: Sandbox) -> None:
    assert sandbox.run("print(6 * 7)") == Finished(0, "42\n")
    assert sandbox.run("raise SystemExit(3)").status == 3
    assert sandbox.run("print(open('/given').read())", "é\0") == Finished(0, "é\0\n")
    assert sandbox.description()["sandbox"] == "bubblewrap"
    assert sandbox.description()["limits"]["file"] == MARK


def test_namespaces_capabilities_and_user_are_its_own(sandbox: Sandbox) -> None:
    with sandbox.started("import time\ntime.sleep(600)"):
        while not (inside := [p for p in left() if "python" in p.name()]):
            pass
        place, own = Path(f"/proc/{inside[0].pid}"), Path("/proc/self")
        for kind in ("user", "pid", "net", "mnt", "ipc", "uts"):
            assert (place / "ns" / kind).readlink() != (own / "ns" / kind).readlink(), kind
        lines = (line.split() for line in (place / "status").read_text().splitlines())
        status = {words[0]: words[1:] for words in lines}
    assert {int(status[f"Cap{kind}:"][0], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {
        0
    }
    assert status["NoNewPrivs:"] == ["1"]
    assert status["Seccomp:"] == ["2"]  # a filter
    assert "0" not in status["Uid:"]


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
        assert "reached" not in sandbox.run(attempt).output


@pytest.mark.parametrize("family", ["AF_INET", "AF_UNIX", "AF_VSOCK", "AF_NETLINK"])
def test_no_socket_can_be_made(sandbox: Sandbox, family: str) -> None:
    made = sandbox.run(f"import socket\nsocket.socket(socket.{family}, socket.SOCK_RAW)")
    assert made.status == 1
    assert "PermissionError" in made.output


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
            assert sandbox.run(READ.format(path=path)).output == "FileNotFoundError\n", path


def test_the_sandbox_has_only_what_python_needs(sandbox: Sandbox) -> None:
    entries = sandbox.run("import os\nprint(*sorted(os.listdir('/')), *os.listdir('/dev'))").output
    allowed = {"dev", "etc", "given", "script.py", "tmp", "usr", "null", *sandbox.python.parts[1:2]}
    assert set(entries.split()) <= allowed | {"lib", "lib32", "lib64", "libx32"}
    assert sandbox.run("import os\nprint(os.listdir('/etc'))").output == "['ld.so.cache']\n"


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


def test_nothing_can_be_made(sandbox: Sandbox, secret: Path) -> None:
    """A place to write would bound bytes, but not the number of files, which take memory, too."""
    possible = outside(WRITE.format(places=[str(secret.parent)], existing=str(secret)))
    assert len(possible.splitlines()) == 6
    places = ["/", "/usr", "/usr/lib", "/etc", "/dev", "/tmp", str(secret.parent), str(Path.cwd())]
    for several in (places, []):
        attempt = WRITE.format(places=several, existing="/given")
        assert sandbox.run(attempt) == Finished(0, "")


def test_no_file_can_be_changed(sandbox: Sandbox, secret: Path) -> None:
    attempt = f"""
for path in ("/script.py", "/given", {str(sandbox.python)!r}, {str(secret)!r}):
    try:
        open(path, "a")
        print(path)
    except OSError:
        pass
"""
    assert str(secret) in outside(attempt)
    assert sandbox.run(attempt) == Finished(0, "")


def test_the_environment_is_empty(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPMOE_TEST_SECRET", "secret value")
    attempt = "import os\nprint(sorted(os.environ))"
    assert "CAPMOE_TEST_SECRET" in outside(attempt)
    names = sandbox.run(attempt).output
    assert names == "['LC_CTYPE', 'PWD', 'PYTHONHASHSEED']\n"
    for pid in ("self", 1, os.getpid()):
        read = READ.format(path=f"/proc/{pid}/environ")
        assert sandbox.run(read).output == "FileNotFoundError\n"


def test_no_process_outside_is_seen_or_signalled(sandbox: Sandbox) -> None:
    attempt = f"""
import os, signal
seen = []
for pid in [*range(1, 10_000), {os.getpid()}, {os.getppid()}]:
    try:
        os.kill(pid, 0)
        seen.append(pid)
    except OSError:
        pass
print(seen)
for target in (os.getppid(), 1, -1, {os.getpid()}):
    try:
        os.kill(target, signal.SIGKILL) if target else None
    except OSError:
        pass
print("still here")
"""
    ended = sandbox.run(attempt)
    # Process 1 is bubblewrap's, which takes no signal from inside.
    assert ended.output == "[1, 2]\nstill here\n"


LIBC = "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"


@pytest.mark.parametrize(
    "call",
    [
        "libc.ptrace(16, 1, 0, 0)",
        "libc.process_vm_readv(1, 0, 0, 0, 0, 0)",
        "libc.shmget(0, ctypes.c_size_t(1 << 33), 0o1600)",
        "libc.unshare(0x10000000)",
        "libc.syscall(425, 8, 0)",
    ],
)
def test_calls_beyond_the_limits_are_refused(sandbox: Sandbox, call: str) -> None:
    said = sandbox.run(f"{LIBC}print({call}, ctypes.get_errno() == errno.EPERM)")
    assert said.output == "-1 True\n"


def test_mounts_and_further_user_namespaces_are_refused(sandbox: Sandbox) -> None:
    script = f"""{LIBC}
print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) if {os.uname().machine == "x86_64"} else -1)
"""
    assert sandbox.run(script).output == "-1\n-1\n"


def test_no_descriptor_is_inherited_and_no_terminal_is_there(sandbox: Sandbox) -> None:
    script = """
import os
for number in range(3, 60):
    try:
        os.fstat(number)
        print("open:", number)
    except OSError:
        pass
try:
    open("/dev/tty")
    print("terminal")
except OSError:
    pass
"""
    with Path(__file__).open() as file:
        os.set_inheritable(file.fileno(), True)
        assert sandbox.run(script) == Finished(0, "")


def test_forks_are_bounded(sandbox: Sandbox) -> None:
    forks = """
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
    assert int(sandbox.run(forks).output) <= LIMITS.processes - 2
    threads = """
import threading, time
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError:
    print(threading.active_count())
"""
    assert int(sandbox.run(threads).output) <= LIMITS.processes - 1
    assert gone()


def test_a_fork_bomb_ends(sandbox: Sandbox) -> None:
    bomb = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    assert sandbox.run(bomb).status != 0
    assert gone()


def test_memory_is_bounded(sandbox: Sandbox) -> None:
    ask = "x = bytearray({} * 2**20)\nprint(len(x))"
    assert sandbox.run(ask.format(100)).output == f"{100 * 2**20}\n"
    refused = sandbox.run(ask.format(800))
    assert refused.status == 1
    assert "MemoryError" in refused.output


SHARED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
kept = 0
for _ in range({number}):
    {prepare}
    place = libc.mmap(None, ctypes.c_size_t({size}), 3, {flags}, {file}, ctypes.c_long(0))
    if place == 2**64 - 1:
        break
    {fill}
    kept += {size}
print(kept)
"""
# A page that is mapped keeps all of what it is a page of.
KEPT = {
    "a file without a name": SHARED.format(
        number=20,
        prepare="import os; file = os.memfd_create('file'); os.truncate(file, 2**20)",
        size=4096,
        flags=0x01,
        file="file",
        fill="os.close(file)",
    ),
    "shared memory": SHARED.format(
        number=20,
        prepare="",
        size=2**20,
        flags=0x21,
        file=-1,
        fill="libc.munmap(ctypes.c_void_p(place + 4096), ctypes.c_size_t(2**20 - 4096))",
    ),
}


@pytest.mark.parametrize("way", KEPT)
def test_no_memory_is_kept_beyond_what_is_mapped(sandbox: Sandbox, way: str) -> None:
    assert int(outside(KEPT[way])) > 0
    ended = sandbox.run(KEPT[way])
    assert ended.output == "0\n" or "PermissionError" in ended.output


def test_memory_of_a_program_alone_can_be_mapped(sandbox: Sandbox) -> None:
    private = "import mmap\nprint(len(mmap.mmap(-1, 2**20, flags=mmap.MAP_PRIVATE)))"
    assert sandbox.run(private) == Finished(0, f"{2**20}\n")


def test_open_files_are_bounded(sandbox: Sandbox) -> None:
    script = """
opened = []
try:
    while True:
        opened.append(open("/dev/null"))
except OSError as error:
    print(error.strerror)
"""
    assert sandbox.run(script).output == "Too many open files\n"


def test_endless_output_is_cut(sandbox: Sandbox) -> None:
    ended = sandbox.run("while True:\n    print('x' * 1000)")
    assert ended.status
    assert 2**19 < len(ended.output) <= MARK


def test_an_endless_loop_ends(sandbox: Sandbox) -> None:
    assert sandbox.run("while True:\n    pass").status == 128 + signal.SIGXCPU
    deaf = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass"
    assert sandbox.run(deaf).status == 128 + signal.SIGKILL
    assert gone()


def test_a_program_that_waits_ends(sandbox: Sandbox) -> None:
    short = Sandbox.open(Limits(idle_seconds=2, file=MARK))
    assert short.run("import time\nprint('waits', flush=True)\ntime.sleep(600)") == Finished(
        None, "waits\n"
    )
    assert gone()


# Uses as much processor time as it says, however long the machine takes to give it.
WORK = "import time\nwhile time.process_time() < {}:\n    pass\nprint('done')"


def test_the_clock_does_not_end_a_program_that_works(sandbox: Sandbox) -> None:
    patient = dataclasses.replace(sandbox, limits=Limits(idle_seconds=2, file=MARK))
    assert patient.run(WORK.format(2.5)) == Finished(0, "done\n")


def test_the_clock_ends_what_works_without_end(sandbox: Sandbox) -> None:
    short = dataclasses.replace(sandbox, limits=Limits(wall_seconds=1, file=MARK))
    assert short.run("while True:\n    pass").status is None
    assert gone()


def test_processes_that_follow_one_another_are_bounded_together(sandbox: Sandbox) -> None:
    """Each process has a limit of its own; without one for all they would go on for minutes."""
    relay = """
import os, time
while True:
    if not os.fork():
        while time.process_time() < 0.5:
            pass
        os._exit(0)
    os.wait()
"""
    assert sandbox.run(relay).status == 128 + signal.SIGXCPU
    assert gone()


def test_no_process_stays_behind(sandbox: Sandbox) -> None:
    daemon = """
import os, signal, time
if not os.fork():
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.closerange(0, 3)
    time.sleep(600)
{}
"""
    with sandbox.started(daemon.format("time.sleep(600)")) as process:
        while len(left()) < 4:  # two of bubblewrap, two of the program
            assert process.poll() is None
    assert gone()
    assert sandbox.run(daemon.format("print('left')")).output == "left\n"
    assert gone()


def test_programs_end_with_a_process_that_is_killed(sandbox: Sandbox) -> None:
    script = f"""
from capmoe_eval.evaluation.generation.limits import Limits
from capmoe_eval.evaluation.generation.sandbox import Sandbox
Sandbox.open(Limits(file={MARK}, idle_seconds=500)).run("import time; time.sleep(500)")
"""
    with subprocess.Popen([sys.executable, "-c", script]) as starting:
        while not left():
            assert starting.poll() is None
        starting.kill()
    assert gone()


# The process adopts what is orphaned below it, as the first process of a container does.
ADOPTS = f"""
import ctypes, os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
import psutil
from capmoe_eval.evaluation.generation.limits import Limits
from capmoe_eval.evaluation.generation.sandbox import Sandbox

adopts = int(sys.argv[1])
libc = ctypes.CDLL(None)
libc.prctl(36, adopts, 0, 0, 0)
foreign = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
sandbox = Sandbox.open(Limits(file={MARK}, idle_seconds=2))
with ThreadPoolExecutor(3) as pool:
    ended = list(pool.map(sandbox.run, ["print(1)", "import time; time.sleep(600)", "x"] * 3))
assert {{each.status for each in ended}} == {{0, 1, None}}
children = psutil.Process().children()
assert [child.pid for child in children] == [foreign.pid], children
assert foreign.wait() == 7
now = ctypes.c_int(-1)
libc.prctl(37, ctypes.byref(now), 0, 0, 0)
assert now.value == adopts, now.value
"""


def test_a_run_that_is_ended_while_it_starts_leaves_nothing(sandbox: Sandbox) -> None:
    """Bubblewrap's two processes wait for each other while they start."""
    for number in range(60):
        with sandbox.started("import time\ntime.sleep(600)"):
            time.sleep(number % 15 / 1000)
    inherited = [child for child in psutil.Process().children() if child.name() == "bwrap"]
    assert inherited == []
    assert gone()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("adopts", [0, 1])
def test_no_zombie_stays_and_children_of_others_are_left_to_them(adopts: int) -> None:
    script = [sys.executable, "-c", ADOPTS, str(adopts)]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


class TestOpen:
    def test_absent(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(UsageError, match=r"not installed; apt install bubblewrap$"):
            Sandbox.open()

    def test_unusable(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        fake = tmp_path / "bwrap"
        tmp_path.chmod(0o755)
        fake.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && { echo bubblewrap 0.8.0; exit; }\n'
            "echo bwrap: No permissions to create new namespace >&2\nexit 1\n"
        )
        fake.chmod(0o755)
        # Where root becomes nobody to start it, nobody has to find it.
        monkeypatch.setattr("os.getuid", lambda: 1000)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
        with pytest.raises(UsageError, match="No permissions to create new namespace") as refused:
            Sandbox.open()
        assert "\n" not in str(refused.value)

    def test_another_machine(self, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("platform.machine", lambda: "ppc64le")
        with pytest.raises(UsageError, match="x86_64 and aarch64, not of ppc64le"):
            Sandbox.open()
