"""A SLURM of one node, with the daemons of Debian's packages and without accounts or keys."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

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

    def run(self, *command: str, timeout: float = 600) -> tuple[str, str]:
        """Run a command, and return what it wrote to standard output and to standard error."""
        process = self.start(*command)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
        assert process.returncode == 0, f"{command} gave {process.returncode}: {err[-3000:]}"
        return out, err

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
            process = subprocess.Popen(
                [name, "-D", "-c"], env=slurm.environment, stdout=log, stderr=log
            )
            daemons.callback(_end, process)
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


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
