"""On a real SLURM: sweeps whose jobs are preempted, and steps of several tasks.

It has one node, the daemons of Debian's packages, and neither accounts nor keys.
"""

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from capmoe_eval.evaluation.run import run
from capmoe_eval.experiment.reservations import holder_of, reserved
from tests.evaluation.test_parallel import records, without_origin
from tests.records import planned, undated

REPOSITORY: Final = Path(__file__).parents[2]
DAEMONS: Final = ("slurmctld", "slurmd")

# More processors, memory and GPUs than there are, so that jobs get what the preset asks for.
_CONFIGURATION: Final = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
ReturnToService=2
KillWait=1
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=localhost CPUs=32 RealMemory=262144 Gres=gpu:2 State=UNKNOWN
PartitionName=test Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""
_GPUS: Final = (
    "NodeName=localhost Name=gpu File=/dev/null\nNodeName=localhost Name=gpu File=/dev/zero\n"
)


def absent() -> str:
    """Return why there can be no SLURM here, or nothing."""
    missing = [name for name in (*DAEMONS, "sbatch", "srun") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: slurmctld, slurmd, slurm-client)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """A running SLURM."""

    def __init__(self, root: Path) -> None:
        prefixes = ("SLURM_", "SBATCH_", "SRUN_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
        self.environment |= {
            "SLURM_CONF": str(root / "slurm.conf"),
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "HOME": str(root / "home"),
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command that knows this SLURM."""
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *command: str) -> tuple[str, str]:
        """Run a command, and return what it wrote to standard output and to standard error."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command, env=self.environment, timeout=600, check=False, **pipes)
        assert done.returncode == 0, f"{command} gave {done.returncode}: {done.stderr[-3000:]}"
        return done.stdout, done.stderr

    def srun(self, tasks: int, *words: str) -> tuple[str, str]:
        """Run the command line as a step of several tasks."""
        step = ("srun", "--ntasks", str(tasks), "--kill-on-bad-exit=1")
        return self.run(*step, sys.executable, "-m", "capmoe_eval", *words)


@contextmanager
def running(root: Path) -> Iterator[Slurm]:
    """Start a SLURM whose files lie in an empty directory, and end it and its jobs."""
    for name in ("state", "spool", "home"):
        (root / name).mkdir()
    with ExitStack() as both:
        sockets = [both.enter_context(socket.socket()) for _ in DAEMONS]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        ports = [listener.getsockname()[1] for listener in sockets]
    (root / "slurm.conf").write_text(_CONFIGURATION.format(root=root, ports=ports))
    (root / "gres.conf").write_text(_GPUS)
    slurm = Slurm(root)
    with ExitStack() as daemons:
        for name in DAEMONS:
            log = daemons.enter_context((root / f"{name}.out").open("w"))
            command = [name, "-D", "-c"]
            daemon = subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log)
            daemons.enter_context(daemon)  # waits for its end
            daemons.callback(daemon.kill)
        wait(lambda: slurm.run("sinfo", "-h", "-o", "%T")[0] == "idle\n", "no node", 60)
        daemons.callback(_end_jobs, slurm)  # those of a failed test would outlive the daemons
        yield slurm


def wait(condition: Callable[[], bool], otherwise: str, within: float = 600) -> None:
    """Wait for a condition, and fail if it does not come."""
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, f"{otherwise}, in {within:g} s"
        time.sleep(0.01)


def _end_jobs(slurm: Slurm) -> None:
    slurm.run("scancel", "--user=root")
    wait(lambda: not slurm.run("squeue", "-h")[0], "jobs do not end", 60)


# Tests.


pytestmark = [pytest.mark.skipif(bool(absent()), reason=absent()), pytest.mark.nightly]

MODELS = ("tiny_olmoe", "tiny_mixtral")
# Enough documents that a job can be stopped between its first record and its last.
WORDS = ("tasks=obqa", "limit=16", "ep_size=2", "batch_size=4")
GRID = "grid.gamma=[1.0,1.5,2.0]"
SWEEP = (f"model={','.join(MODELS)}", *WORDS, GRID)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of both models, computed by this process."""
    root = tmp_path_factory.mktemp("alone")
    for model in MODELS:
        assert not run(planned(f"model={model}", *WORDS, GRID, f"results_dir={root}")).failures
    return records(root)


def contents(jobs: dict[str, Any]) -> dict[str, Any]:
    return {path: undated(record) for path, record in jobs.items()}


def count(root: Path, model: str) -> int:
    """Return how many records a model has."""
    return len(list(root.glob(f"{model}/*/*.json")))


def stopped(process: int) -> bool:
    """Make a process stand still, and return whether it is there."""
    try:
        os.kill(process, signal.SIGSTOP)
    except ProcessLookupError:
        return False
    return True


def awaits(process: int, number: signal.Signals) -> bool:
    """Return whether a signal will reach a process as soon as it goes on."""
    status = Path(f"/proc/{process}/status").read_text()
    pending = re.search(r"ShdPnd:\s*([0-9a-f]+)", status)
    return pending is not None and bool(int(pending[1], 16) >> (number - 1) & 1)


def caught(root: Path, models: tuple[str, ...]) -> list[int]:
    """Return the processes of the models' jobs, each standing still in a cell after its first."""
    jobs: dict[str, int] = {}

    def all_of_them() -> bool:
        for model in set(models) - jobs.keys():
            assert count(root, model) < 3, "too fast to be stopped"
            for record in reserved(root.glob(f"{model}/*/")):
                holder = holder_of(record)
                if holder is None:
                    continue
                process = int(holder.rpartition(":")[2])
                if count(root, model) and stopped(process):
                    if holder_of(record) == holder:
                        jobs[model] = process
                    else:  # it was faster
                        os.kill(process, signal.SIGCONT)
        return len(jobs) == len(models)

    wait(all_of_them, "no job between two records")
    return [jobs[model] for model in models]


@pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None, reason="needs submitit, the extra `slurm`"
)
def test_a_sweep_whose_jobs_are_requeued_gives_the_records_of_one_process(
    cluster: Slurm, alone: dict[str, Any], tmp_path: Path
) -> None:
    """One job is preempted by the cluster, the other gets the signal before the time limit."""
    root, shared = tmp_path / "shared/results", tmp_path / "shared/.submitit"
    words = ("-m", "hydra/launcher=slurm", *SWEEP, f"results_dir={root}")
    submitter = cluster.start(sys.executable, "-m", "capmoe_eval", *words)
    try:
        preempted, late = caught(root, MODELS)
        array = next(shared.glob("*_0")).name.removesuffix("_0")
        cluster.run("scontrol", "requeue", f"{array}_0")
        # SLURM lets it go on, to end it: it is killed where it stands still again.
        wait(lambda: not stopped(preempted), "the job that is requeued does not end", 60)
        cluster.run("scancel", "--signal=USR2", f"{array}_1")
        wait(lambda: awaits(late, signal.SIGUSR2), "the signal does not come", 60)
        finished = [count(root, model) for model in MODELS]
        os.kill(late, signal.SIGCONT)
        out, err = submitter.communicate(timeout=600)
    finally:
        submitter.kill()
    assert submitter.returncode == 0, err
    table, end, _ = out.partition("\n6 finished, 0 missing\n")
    assert end
    assert "task  model" in table
    assert [table.count(f" {model} ") for model in MODELS] == [3, 3]
    assert contents(records(root)) == contents(alone)
    assert not list(root.rglob(".*.lock")), "nothing is left of the process that was killed"
    for job, before in enumerate(finished):
        assert before in (1, 2)
        log = (shared / f"{array}_{job}/{array}_{job}_0_log.out").read_text()
        assert log.count("Starting with JobEnvironment") == 2
        assert f"{3 - before} computed, {before} finished before, 0 failed" in log
    for home in ("HOME", "XDG_CACHE_HOME"):
        assert not list(Path(cluster.environment[home]).rglob("*submi*")), "jobs may not see it"


def test_the_tasks_of_a_step_are_ranks(
    cluster: Slurm, alone: dict[str, Any], tmp_path: Path
) -> None:
    where = ("gamma=1.0", f"results_dir={tmp_path}")
    out, _ = cluster.srun(2, f"model={MODELS[0]}", *WORDS, *where, "parallel=ep")
    assert out.count("1 computed, 0 finished before, 0 failed") == out.count("computed") == 1
    ((path, record),) = records(tmp_path).items()
    origin = record["capmoe"]["provenance"]["parallel"]
    assert origin == {"kind": "ep", "ranks": 2, "backend": "gloo"}
    assert without_origin(record) == without_origin(alone[path])
    assert record["results"] == alone[path]["results"]
