"""Processes that ``srun`` starts are one group as those of ``torchrun`` are, for parallel=ep."""

import os

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.processes import adopt_srun, process_count, process_rank

TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "login1,gpu[08-09]",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *(name for name in os.environ if name.startswith("SLURM_"))):
        monkeypatch.setenv(name, "")  # restored in the end, also where adopt_srun sets it
        monkeypatch.delenv(name)


def step(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    for name, value in {**STEP, **changes}.items():
        if value is not None:
            monkeypatch.setenv(name, value)


def found() -> dict[str, str]:
    return {name: os.environ[name] for name in TORCHRUN if name in os.environ}


def test_a_step_of_srun_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    step(monkeypatch)
    assert (process_count(), process_rank()) == (None, 0), "alone, unless it is to be one of them"
    adopt_srun()
    assert (process_count(), process_rank()) == (4, 3)
    port = found().pop("MASTER_PORT")
    assert 20_000 <= int(port) < 32_000
    assert found() == {
        "WORLD_SIZE": "4",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu08",
        "MASTER_PORT": port,
    }
    adopt_srun()
    assert found()["MASTER_PORT"] == port


@pytest.mark.parametrize("absent", ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID"])
def test_a_batch_script_is_no_step(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    """It has SLURM_NTASKS, too; nobody else was started."""
    step(monkeypatch, **{absent: None})
    adopt_srun()
    assert found() == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node", "node"),
        ("n1,n2", "n1"),
        ("gpu-a[007,9-12],login", "gpu-a007"),
        ("gpu[3-4],n[1-2]", "gpu3"),
        ("a.example.org", "a.example.org"),
    ],
)
def test_the_first_node_is_read(monkeypatch: pytest.MonkeyPatch, nodes: str, first: str) -> None:
    step(monkeypatch, SLURM_STEP_NODELIST=nodes)
    adopt_srun()
    assert found()["MASTER_ADDR"] == first


@pytest.mark.parametrize("nodes", ["r[1-2]n[1-8]", "n[1-2].cluster", ""])
def test_an_unreadable_list_says_what_works(monkeypatch: pytest.MonkeyPatch, nodes: str) -> None:
    step(monkeypatch, SLURM_STEP_NODELIST=nodes, SLURM_JOB_NODELIST=nodes)
    with pytest.raises(UsageError, match=r"export MASTER_ADDR=\$\(scontrol show hostnames"):
        adopt_srun()
