"""On a real SLURM of one node: a sweep whose jobs are requeued, and a step of several tasks.

Its daemons are those of Debian's packages, without accounts or keys.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.evaluation.test_killed_sweeps import content
from tests.evaluation.test_parallel import records, run_here, without_origin

DAEMONS: Final = ("slurmctld", "slurmd")
MISSING: Final = [name for name in (*DAEMONS, "sbatch", "srun") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING} (slurmctld, slurmd, slurm-client)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
    pytest.mark.nightly,
]

MODELS = ("tiny_olmoe", "tiny_mixtral")
WORDS = ("tasks=obqa", "limit=32", "ep_size=2", "batch_size=4")
# So many that a job is not finished when it is requeued after its first record; 12 are packed.
GAMMAS = [1 + number / 10 for number in range(11)]
SWEEP = (f"model={','.join(MODELS)}", *WORDS, f"grid.gamma={GAMMAS}".replace(" ", ""))
# More processors, memory and GPUs than there are, so that jobs get what the preset asks for.
CONFIGURATION: Final = """
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
GPUS: Final = "".join(f"NodeName=localhost Name=gpu File=/dev/{n}\n" for n in ("null", "zero"))


class Slurm:
    """A SLURM whose files lie in an empty directory; the end of its block ends its jobs and it."""

    def __init__(self, root: Path) -> None:
        prefixes = ("SLURM_", "SBATCH_", "SRUN_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
        self._root, self._daemons = root, ExitStack()
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
        self.environment |= {
            "SLURM_CONF": str(root / "slurm.conf"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
            "HOME": str(root / "home"),
        }

    def __enter__(self) -> Slurm:
        for name in ("state", "spool", "home"):
            (self._root / name).mkdir()
        with ExitStack() as both:
            sockets = [both.enter_context(socket.socket()) for _ in DAEMONS]
            for listener in sockets:
                listener.bind(("127.0.0.1", 0))
            ports = [listener.getsockname()[1] for listener in sockets]
        text = CONFIGURATION.format(root=self._root, ports=ports)
        (self._root / "slurm.conf").write_text(text)
        (self._root / "gres.conf").write_text(GPUS)
        for name in DAEMONS:
            log = self._daemons.enter_context((self._root / f"{name}.out").open("w"))
            process = subprocess.Popen(
                [name, "-D", "-c"], env=self.environment, stdout=log, stderr=log
            )
            self._daemons.callback(process.wait, 30)
            self._daemons.callback(process.terminate)
        wait(lambda: self.run("sinfo", "-h", "-o", "%T")[0] == "idle\n", "no node")
        return self

    def __exit__(self, *_: object) -> None:
        with self._daemons:  # the jobs of a failed test would outlive the daemons
            self.run("scancel", "--user=root")
            wait(lambda: not self.run("squeue", "-h")[0], "jobs do not end")

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command that knows this SLURM."""
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *command: str) -> tuple[str, str]:
        """Run a command, and return what it wrote to standard output and to standard error."""
        return self.ended(self.start(*command))

    def ended(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        """Return what a command wrote until its end."""
        try:
            out, err = process.communicate(timeout=600)
        finally:
            process.kill()
        assert process.returncode == 0, err[-3000:]
        return out, err


def wait(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait for a condition, and fail if it does not come."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of both models, computed by this process."""
    root = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        assert not run_here(patch, "-m", *SWEEP, f"results_dir={root}")
    return records(root)


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
        for job, end in enumerate((("scontrol", "requeue"), ("scancel", "--signal=USR2"))):
            wait(lambda job=job: any(root.glob(f"{MODELS[job]}/*/*.json")), "no record")  # type: ignore[misc]
            array = next(shared.glob("*_0")).name.removesuffix("_0")
            cluster.run(*end, f"{array}_{job}")
    finally:
        out, err = cluster.ended(submitter)
    total = len(GAMMAS)
    table, end_of_table, _ = out.partition(f"\n{2 * total} finished, 0 missing\n")
    assert end_of_table, err
    assert [table.count(f" {model} ") for model in MODELS] == [total, total]
    computed = {path: content(record) for path, record in records(root).items()}
    assert computed == {path: content(record) for path, record in alone.items()}
    assert not list(root.rglob(".*.lock")), "nothing is left of the process that was killed"
    for job in range(len(MODELS)):
        log = (shared / f"{array}_{job}/{array}_{job}_0_log.out").read_text()
        assert log.count("Starting with JobEnvironment") == 2
        ((computed_then, before),) = re.findall(r"(\d+) computed, (\d+) finished before, 0 f", log)
        assert 0 < int(before) < total == int(computed_then) + int(before)
    home = Path(cluster.environment["HOME"])
    assert not list(home.rglob("*submi*")), "jobs may not see it"


def test_the_tasks_of_a_step_are_ranks(
    cluster: Slurm, alone: dict[str, Any], tmp_path: Path
) -> None:
    step = ("srun", "--ntasks", "2", "--kill-on-bad-exit=1", sys.executable, "-m", "capmoe_eval")
    where = ("gamma=1.0", f"results_dir={tmp_path}", "parallel=ep")
    out, _ = cluster.run(*step, f"model={MODELS[0]}", *WORDS, *where)
    assert out.count("1 computed, 0 finished before, 0 failed") == out.count("computed") == 1
    ((path, record),) = records(tmp_path).items()
    origin = record["capmoe"]["provenance"]["parallel"]
    assert origin == {"kind": "ep", "ranks": 2, "backend": "gloo"}
    assert without_origin(record) == without_origin(alone[path])
    assert record["results"] == alone[path]["results"]
