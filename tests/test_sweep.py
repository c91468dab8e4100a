"""A sweep's jobs are composed once for each choice of files, and to what Hydra composes."""

from __future__ import annotations

from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from capmoe_eval.experiment.configuration import config_directory, plans

Plugins.instance()  # as Hydra imports them
from hydra_plugins.capmoe_launcher.compose import composed_jobs  # noqa: E402

JOBS = [
    [f"model={model}", f"gamma={gamma}", f"seed={seed}", "tasks=[obqa,piqa]", *more]
    for model in ("zoo_olmoe", "zoo_mixtral")
    for gamma in ("${model.gamma}", "inf")
    for seed in (0, 1)
    for more in (
        ["method=random"],
        ["variant=released_code", "method=order", "tasks.piqa.fewshot=2"],
        ["data.root=synthetic", "data.name='a, \"b\"'", "+new=3", "batch_size=4"],
        ["~rounds", "model.name=mine", "limit=null"],
    )
]


class Counting:
    """Hydra's loader, with a count of what it composes."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.composed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, config: DictConfig, words: list[str]) -> DictConfig:
        self.composed += 1
        found: DictConfig = self._loader.load_sweep_config(config, words)
        return found


@pytest.fixture
def sweep() -> Any:
    """The loader, and the configuration of a sweep."""
    HydraConfig.instance().cfg = None  # a command that another test ran here leaves its own
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("config", [], RunMode.MULTIRUN)
        yield Counting(loader), master
    assert not HydraConfig.initialized()


def test_jobs_are_what_hydra_composes(sweep: Any) -> None:
    loader, master = sweep
    found = list(composed_jobs(loader, master, JOBS))
    assert len(found) == len(JOBS) == 32
    # Two models, and for each of them four choices of files, additions and removals.
    assert loader.composed == 2 * 4
    for words, job in zip(JOBS, found, strict=True):
        wanted = loader.load_sweep_config(master, list(words))
        OmegaConf.set_struct(wanted, False)
        OmegaConf.set_readonly(wanted, False)
        wanted.pop("hydra")
        assert OmegaConf.to_container(job) == OmegaConf.to_container(wanted)
    assert [job.seed for job in found[:8]] == [0, 0, 0, 0, 1, 1, 1, 1], "jobs share nothing"
    assert plans(found[0])[0].cell.method.name == "random"


def test_many_seeds_are_composed_once(sweep: Any) -> None:
    loader, master = sweep
    jobs = [["method=random", f"seed={seed}", "tasks=obqa"] for seed in range(50)]
    assert [job.seed for job in composed_jobs(loader, master, jobs)] == list(range(50))
    assert loader.composed == 1


@pytest.mark.parametrize("words", [["gama=1"], ["model=zoo"], ["model.nme=x"], ["hydra.nothing=1"]])
def test_what_cannot_be_composed_is_said_as_hydra_says_it(sweep: Any, words: list[str]) -> None:
    loader, master = sweep
    with pytest.raises(HydraException) as wanted:
        loader.load_sweep_config(master, list(words))
    with pytest.raises(HydraException) as found:
        list(composed_jobs(loader, master, [words]))
    assert str(found.value) == str(wanted.value)
