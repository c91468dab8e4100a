"""Rank and number of processes under ``torchrun`` or ``srun``, without torch."""

import os
import re
from typing import Final

from capmoe_eval.errors import UsageError

_SRUN: Final = {
    # Not SLURM_NTASKS, which a batch script has as well, where nothing else was started.
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
}
_NODES: Final = re.compile(r"(?P<name>[^,\[\]]+)(\[(?P<number>\d+)[\d,-]*\])?(,.*)?")
"""A list of nodes such as ``gpu[03-05,09],login1``: its first node."""
_PORTS: Final = range(20_000, 32_000)  # below those that Linux gives to connections


def process_count() -> int | None:
    """Return how many processes were started together, or None outside of ``torchrun``."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdecimal() else None


def process_rank() -> int:
    """Return this process's number among them; 0 outside of ``torchrun``."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and (process_count() or 1) > 1 else 0


def of_submitit(error: BaseException) -> bool:
    """Return whether an error is submitit's: that a job has ended, such as at its time limit."""
    return type(error).__module__.partition(".")[0] == "submitit"


def adopt_srun() -> None:
    """Make one group of the processes that ``srun`` started, by the variables of ``torchrun``.

    Nothing changes where those are set, or where ``srun`` did not start this process.

    Raises:
        UsageError: If the address of the first node is not known.
    """
    if process_count() is not None or not set(_SRUN.values()) <= os.environ.keys():
        return
    for name, slurm in _SRUN.items():
        os.environ[name] = os.environ[slurm]
    if "MASTER_ADDR" not in os.environ:
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
        if (match := _NODES.fullmatch(nodes)) is None:
            raise UsageError(
                f"SLURM_STEP_NODELIST={nodes}: the first node cannot be read from it; say before "
                'srun: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | '
                "head -n 1)"
            )
        os.environ["MASTER_ADDR"] = match["name"] + (match["number"] or "")
    job, step = (os.environ.get(f"SLURM_{name}_ID", "") for name in ("JOB", "STEP"))
    number = 16 * int(job if job.isdecimal() else 0) + int(step if step.isdecimal() else 0)
    os.environ.setdefault("MASTER_PORT", str(_PORTS[number % len(_PORTS)]))
