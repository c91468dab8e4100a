"""A sweep's jobs are composed once for each choice of files, and to what Hydra composes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment import composition
from capmoe_eval.experiment.composition import (
    compose_jobs,
    config_directory,
    store_knobs,
    sweep_jobs,
)
from capmoe_eval.experiment.configuration import plans

JOBS = [
    [f"model={model}", f"gamma={gamma}", f"seed={seed}", "tasks=[obqa,piqa]", *more]
    for model in ("zoo_olmoe", "zoo_mixtral")
    for gamma in ("${model.gamma}", "inf")
    for seed in (0, 1)
    for more in (
        ["method=random"],
        ["variant=released_code", "method=order", "tasks.piqa.fewshot=2"],
        ["data.root=miniworld", "data.name='a, \"b\"'", "+new=3", "batch_size=4"],
        ["~rounds", "model.name=mine", "limit=null"],
    )
]


@pytest.fixture
def loader() -> Iterator[Any]:
    """Hydra's own loader."""
    HydraConfig.instance().cfg = None  # a command that another test ran here leaves its own
    store_knobs()
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()
    assert not HydraConfig.initialized()


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is composed of files from here on."""
    calls: list[object] = []
    compose = composition.compose_words
    monkeypatch.setattr(
        composition, "compose_words", lambda words: (calls.append(words), compose(words))[1]
    )
    return calls


def test_jobs_are_what_hydra_composes(loader: Any, composed: list[object]) -> None:
    jobs = list(compose_jobs(JOBS))
    assert len(jobs) == len(JOBS) == 32
    # Two models, and for each of them four choices of files, additions and removals.
    assert len(composed) == 2 * 4
    master = loader.load_configuration("config", [], RunMode.MULTIRUN)
    for words, job in zip(JOBS, jobs, strict=True):
        by_hydra = loader.load_sweep_config(master, list(words))
        OmegaConf.set_struct(by_hydra, False)
        OmegaConf.set_readonly(by_hydra, False)
        by_hydra.pop("hydra")
        assert OmegaConf.to_container(job) == OmegaConf.to_container(by_hydra)
    assert [job.seed for job in jobs[:8]] == [0, 0, 0, 0, 1, 1, 1, 1], "jobs share nothing"
    assert plans(jobs[0])[0].cell.method.name == "random"


def test_many_seeds_are_composed_once(composed: list[object]) -> None:
    jobs = sweep_jobs(["method=random", "seed=range(0,50)", "tasks=obqa"])
    assert [job.seed for job in compose_jobs(jobs)] == list(range(50))
    assert len(composed) == 1


@pytest.mark.parametrize("words", ["seed=range(0,0)", "seed=range(3,0)", "seed=range(0,200000)"])
def test_a_range_has_a_sensible_number_of_values(words: str) -> None:
    with pytest.raises(UsageError, match="must be a range of 1 to 100000 values"):
        sweep_jobs([words])


@pytest.mark.parametrize("words", [["gama=1"], ["model=zoo"], ["model.nme=x"], ["hydra.nothing=1"]])
def test_what_cannot_be_composed_is_said_as_hydra_says_it(loader: Any, words: list[str]) -> None:
    with pytest.raises(HydraException) as by_hydra:
        loader.load_configuration("config", list(words), RunMode.RUN)
    with pytest.raises(HydraException) as error:
        list(compose_jobs([words]))
    assert str(error.value) == str(by_hydra.value)
