"""The bootstrap over models, beside a loop that says what it is."""

from __future__ import annotations

import itertools
import random
import statistics

import numpy as np
import pytest

from capmoe_eval.experiment.names import family, split_seed
from capmoe_eval.paper.hierarchy import over_models
from capmoe_eval.paper.pairing import Paired, Unpaired, pair

Models = dict[str, dict[str, Paired]]


def paired(differences: list[float], batches: list[int] | None = None) -> Paired:
    first = np.array(differences)
    clusters = None if batches is None else np.array(batches)
    return Paired((("t", "d"),), first, np.zeros(len(first)), clusters)


def naive(models: Models, draws: int = 4000) -> tuple[float, float]:
    """Draw models, then seeds of each, then batches of each task, one by one."""
    rng = random.Random(1)
    names = sorted({family(model) for model in models})
    effects = []
    for _ in range(draws):
        by_task: dict[str, list[float]] = {}
        for name in rng.choices(names, k=len(names)):
            seeds = [tasks for model, tasks in models.items() if family(model) == name]
            of_model: dict[str, list[float]] = {}
            for tasks in rng.choices(seeds, k=len(seeds)):
                for task, found in tasks.items():
                    values = found.differences.tolist()
                    labels = range(len(values)) if found.batches is None else found.batches.tolist()
                    clusters: dict[int, list[float]] = {}
                    for label, value in zip(labels, values, strict=True):
                        clusters.setdefault(label, []).append(value)
                    drawn = rng.choices(list(clusters.values()), k=len(clusters))
                    mean = statistics.fmean(itertools.chain(*drawn))
                    of_model.setdefault(task, []).append(mean)
            for task, means in of_model.items():
                by_task.setdefault(task, []).append(statistics.fmean(means))
        effects.append(statistics.fmean(map(statistics.fmean, by_task.values())))
    low, high = np.percentile(effects, [2.5, 97.5])
    return float(low), float(high)


def made(seed: int) -> Models:
    """Three models, one of three seeds, with batches on one of two tasks."""
    rng = random.Random(seed)
    models: Models = {}
    for model, shift in (("a", 0.3), ("a_s1", 0.5), ("a_s2", 0.1), ("b", -0.1), ("c", 0.6)):
        of_batch = [rng.choice((0.0, 1.0)) for _ in range(6)]
        grouped = [value + shift for value in of_batch for _ in range(5)]
        batches = [number for number in range(6) for _ in range(5)]
        single = [rng.choice((-1.0, 0.0, 1.0)) + shift for _ in range(40)]
        models[model] = {"grouped": paired(grouped, batches), "single": paired(single)}
    return models


@pytest.mark.parametrize("seed", [0, 1])
def test_the_interval_is_that_of_the_loop(seed: int) -> None:
    found = over_models(made(seed))
    assert found == pytest.approx(naive(made(seed)), abs=0.03)
    assert found == over_models(made(seed))


def test_batches_make_the_interval_wider_than_their_documents_do() -> None:
    whole = {model: {"t": tasks["grouped"]} for model, tasks in made(0).items()}
    apart = {m: {"t": paired(tasks["t"].differences.tolist())} for m, tasks in whole.items()}
    (low, high), (other_low, other_high) = (
        over_models(whole) or (0, 0),
        over_models(apart) or (0, 0),
    )
    assert high - low > other_high - other_low


def test_models_that_differ_decide_the_width_and_one_model_has_none() -> None:
    alike = {name: {"t": paired([1.0] * 50)} for name in "abc"}
    assert over_models(alike) == (1.0, 1.0)
    differing = {
        name: {"t": paired([value] * 50)} for name, value in zip("abc", (0, 1, 2), strict=True)
    }
    assert over_models(differing) == (0.0, 2.0)
    assert over_models({"a": alike["a"]}) is None
    # Seeds of one model are no further models.
    assert over_models({"a": alike["a"], "a_s1": alike["b"]}) is None


def test_a_models_name_may_end_in_its_training_seed() -> None:
    names = ("zoo_olmoe", "zoo_olmoe_s1", "zoo_olmoe_seed12", "zoo_deepseek_v2")
    assert [family(name) for name in names] == ["zoo_olmoe"] * 3 + ["zoo_deepseek_v2"]
    assert [split_seed(name)[1] for name in names] == [None, 1, 12, None]


def test_batches_count_where_all_evaluations_name_the_same() -> None:
    one, other, without = (
        {"t": ("d", np.array([1.0, 0.0]), np.array(batches, np.int64), np.array([], np.int64))}
        for batches in ([0, 1], [1, 1], [])
    )
    same = pair([one], [one])
    assert not isinstance(same, Unpaired) and same.batches is not None
    assert same.batches.tolist() == [0, 1]
    for second in (other, without):
        found = pair([one], [second])
        assert not isinstance(found, Unpaired) and found.batches is None
