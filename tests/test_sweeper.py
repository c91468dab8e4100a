"""The jobs of a sweep, and launchers of Hydra that are not ours: they are summed up here."""

from types import SimpleNamespace

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.composition import compose_words
from capmoe_eval.experiment.configuration import plans
from hydra_plugins import capmoe_sweeper as sweeper_module
from hydra_plugins.capmoe_sweeper import CellSweeper, sweep_jobs
from tests.conftest import Shell

WORDS = ("tasks=obqa", "limit=2", "model=tiny_olmoe", "ep_size=2", "batch_size=4", "gamma=1.0")


# Hydra's launcher, under a name that is no process's own: each job is composed and run by itself.
ConfigStore.instance().store(
    group="hydra/launcher",
    name="each",
    node={"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"},
)


@pytest.mark.slow
def test_the_results_of_all_jobs_are_printed_in_the_end(shell: Shell) -> None:
    status, text, _ = shell("-m", "hydra/launcher=each", *WORDS, "method=order,score")
    out = text.splitlines()
    assert status == 0
    end = out.index("2 finished, 0 missing")
    assert out[:end].count("1 computed, 0 finished before, 0 failed") == 2
    heading, order, score, _ = out[end - 4 : end]
    assert heading.startswith("task")
    assert "order-g1" in order
    assert "score-g1" in score


@pytest.mark.slow
def test_a_job_that_fails_gives_its_status(shell: Shell) -> None:
    jobs = ("-m", "hydra/launcher=each", *WORDS, "model.name=mine")
    status, out, err = shell(*jobs, "model.pretrained=tiny:olmoe,/no/model")
    assert status == 2
    assert "model.pretrained=/no/model: cannot be loaded" in err
    assert "1 finished, 1 missing" in out


def test_a_lost_job_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class UncompletedJobError(RuntimeError):
        """As submitit raises it for a job without a result."""

    def lost(*_: object, **__: object) -> None:
        raise UncompletedJobError("Job 7 has not produced any output\nmore")

    UncompletedJobError.__module__ = "submitit.core.utils"
    config = {"runtime": {"choices": {"hydra/launcher": "slurm"}}}
    config["launcher"] = {"max_num_timeout": 2, "timeout_min": 30}
    sweeper = CellSweeper()
    sweeper.config = OmegaConf.create({"hydra": config})
    sweeper.launcher = SimpleNamespace(launch=lost)
    monkeypatch.setattr(sweeper, "validate_batch_is_legal", lambda _: None)
    with pytest.raises(UsageError, match=r"not produced any output\); finished cells are kept"):
        sweeper.sweep([])
    too_often = UncompletedJobError("Job not requeued because: timed-out too many times.")
    monkeypatch.setattr(sweeper_module, "plans", lambda _: [])
    job = JobReturn(overrides=["gamma=1.0"], status=JobStatus.FAILED)
    job.return_value = too_often
    sweeper.launcher.launch = lambda *_, **__: [job]
    line = r"^hydra.launcher.max_num_timeout=2: a job reached its limit of 30 minutes once more; "
    with pytest.raises(UsageError, match=line):
        sweeper.sweep([])
    sweeper.launcher.launch = lost
    UncompletedJobError.__module__ = sweeper_module.__name__
    with pytest.raises(UncompletedJobError):
        sweeper.sweep([])


def test_a_launcher_gets_at_most_so_many_jobs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[tuple[int, list[list[str]]]] = []
    sweeper = CellSweeper(max_batch_size=2)
    monkeypatch.setattr(sweeper, "validate_batch_is_legal", lambda _: None)
    sweeper.launcher = SimpleNamespace(
        launch=lambda batch, initial_job_idx: batches.append((initial_job_idx, batch))
    )
    list(sweeper._launched([["seed=0"], ["seed=1"], ["seed=2"]]))
    assert batches == [(0, [["seed=0"], ["seed=1"]]), (2, [["seed=2"]])]


def test_jobs_are_all_combinations_in_their_order() -> None:
    jobs = sweep_jobs(["method=random,order", "seed=range(0,2)", "tasks=[obqa,piqa]"])
    settings = [(job.method, job.seed, [*job.tasks]) for job in map(compose_words, jobs)]
    tasks = ["obqa", "piqa"]
    assert settings == [(name, seed, tasks) for name in ("random", "order") for seed in (0, 1)]
    assert [len(plans(compose_words(job))) for job in jobs] == [2] * 4
