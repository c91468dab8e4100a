"""A sweep's jobs, from the words of a command line."""

from __future__ import annotations

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.composition import compose_words
from capmoe_eval.experiment.configuration import plans
from hydra_plugins.capmoe_sweeper import sweep_jobs


def test_jobs_are_all_combinations_in_their_order() -> None:
    jobs = sweep_jobs(["method=random,order", "seed=range(0,2)", "tasks=[obqa,piqa]"])
    settings = [(job.method, job.seed, [*job.tasks]) for job in map(compose_words, jobs)]
    tasks = ["obqa", "piqa"]
    assert settings == [(name, seed, tasks) for name in ("random", "order") for seed in (0, 1)]
    assert [len(plans(compose_words(job))) for job in jobs] == [2] * 4


@pytest.mark.parametrize("words", ["seed=range(0,0)", "seed=range(3,0)", "seed=range(0,200000)"])
def test_a_range_has_a_sensible_number_of_values(words: str) -> None:
    with pytest.raises(UsageError, match="must be a range of 1 to 100000 values"):
        sweep_jobs([words])
