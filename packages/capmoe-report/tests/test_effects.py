"""Effects: the definition as loops, their errors, and intervals that cover."""

import dataclasses
import math
import statistics as stdlib
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from capmoe_eval.experiment.names import family
from capmoe_eval.paper.pairing import Paired, shares
from capmoe_eval.paper.statistics import mcnemar
from capmoe_eval.results.frames import results_of
from capmoe_eval.routing.registry import create_method
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.nightly import nightly_but
from tests.paper.test_statistics import SCORES, paired

from capmoe_report.contrasts import judge_contrasts, read_contrasts
from capmoe_report.effects import by_family, contrast, pooled
from tests import records

Models = dict[str, dict[str, Paired]]


def naive_effect(models: Models) -> float:
    """The definition, loop by loop: families, training seeds, tasks, documents."""
    of_families = []
    for name in sorted({family(model) for model in models}):
        of_seeds = []
        for model, tasks in models.items():
            if family(model) == name:
                of_tasks = [stdlib.fmean(paired.differences) for paired in tasks.values()]
                of_seeds.append(stdlib.fmean(of_tasks))
        of_families.append(stdlib.fmean(of_seeds))
    return 100 * stdlib.fmean(of_families)


MODELS = st.dictionaries(
    st.sampled_from(["a", "a_s1", "a_s2", "b", "b_s1", "c"]),
    st.dictionaries(
        st.sampled_from(["t", "u", "v"]),
        st.lists(SCORES, min_size=1, max_size=4).map(paired),
        min_size=1,
    ),
    min_size=1,
)


@given(MODELS)
@settings(max_examples=60, deadline=None)
def test_an_effect_is_the_mean_of_means_whatever_cells_are_missing(models: Models) -> None:
    sized = {
        model: {
            task: dataclasses.replace(paired, documents=(("t", str(len(paired.first))),))
            for task, paired in tasks.items()
        }
        for model, tasks in models.items()
    }
    effect = pooled(sized)
    assert effect.points == pytest.approx(naive_effect(models), abs=1e-9)
    # The columns of families are parts of the effect.
    columns = by_family(effect.models).values()
    assert stdlib.fmean(columns) == pytest.approx(effect.points, abs=1e-9)
    assert sum(shares(sized).values()) == pytest.approx(1)


def test_the_error_over_documents_is_that_of_their_means() -> None:
    """Two families answer the same task, and one a second: a document counts by all its answers."""
    rng = np.random.default_rng(4)
    first, second, other = (rng.choice([-1.0, 0.0, 1.0], size) for size in (40, 40, 25))
    models = {"a": {"t": paired(first), "u": paired(other)}, "b": {"t": paired(second)}}
    on_both = first / 4 + second / 2
    expected = 100 * math.sqrt(on_both.var() / 40 + (other / 4).var() / 25)
    effect = pooled(models)
    assert effect.error == pytest.approx(expected)
    assert effect.worth == pytest.approx(100 * 0.75 / 40)
    assert pooled(models, "answer").worth == pytest.approx(100 * 0.5 / 40)
    assert effect.documents == 65


@given(st.integers(0, 30), st.integers(0, 30))
@example(0, 2)
@settings(deadline=None)
def test_p_of_one_task_is_mcnemars_but_for_the_normal_curve(gained: int, lost: int) -> None:
    effect = pooled({"a": {"t": paired([1.0] * gained + [-1.0] * lost + [0.0] * 140)}})
    assert effect.points is not None
    # The correction leaves 0.0205 to the exact test at two against none, elsewhere half as much.
    assert effect.p(effect.points) == pytest.approx(mcnemar(gained, lost), abs=0.021)


def test_less_than_one_documents_worth_decides_nothing() -> None:
    """Every document but one is answered alike, by each of three families."""
    models = {name: {"t": paired([-1.0] + [0.0] * 9999)} for name in "abc"}
    effect = pooled(models)
    assert effect.p(effect.worth) == 1.0
    assert effect.p(effect.worth, wide=True) == 1.0
    assert effect.p(100 * effect.worth) < 1e-6


@pytest.mark.parametrize("wide", [False, True])
def test_p_is_that_of_the_interval_that_reaches_the_bound(wide: bool) -> None:
    rng = np.random.default_rng(6)
    effect = pooled({n: {"t": paired(rng.normal(0.05, 0.3, 20_000))} for n in "abc"})
    low, high = effect.interval(wide=wide)
    # The variance around the bound adds 1/20,000 of its square.
    assert effect.p((high - low) / 2 + effect.worth, wide=wide) == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize("level", [0.05, 0.05 / 11])
def test_four_of_five_studies_decide_the_detectable_distance(level: float) -> None:
    rng = np.random.default_rng(7)
    study = pooled({"a": {"t": paired(rng.normal(0.0, 0.3, 20_000))}})
    truths = study.detectable(level) + study.error * rng.standard_normal(2000)
    decided = [study.p(truth) < level for truth in truths]
    assert np.mean(decided) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize(("planned", "level"), [(0, 0.05), (11, 0.05 / 11)])
def test_what_a_contrast_could_decide_is_corrected_as_its_p(planned: int, level: float) -> None:
    """A distance that only an uncorrected test decides was printed beside a corrected verdict."""
    side, other = {"method": "score", "gamma": 1.5}, {"method": "baseline"}
    (row,) = read_contrasts([{"a": side, "b": other, "expect": {"at_least": "-comparable"}}])
    study = pooled({"a": {"t": paired(np.random.default_rng(8).normal(0, 0.3, 20_000))}})
    (finding,) = judge_contrasts([row], [study], planned=planned)
    assert finding.detectable == study.detectable(level)


def replications(seeds: Sequence[int], family_sd: float, shared_sd: float) -> Iterator[Models]:
    """Studies of families with so many training seeds, whose true effect is 0.

    Every second family has documents three times as noisy; ``shared_sd`` is what a document does
    to all families alike, in points as the others.
    """
    rng = np.random.default_rng(20260107)
    for _ in range(1000):
        documents = [rng.normal(0, shared_sd, 60) for _ in range(2)]
        models: Models = {}
        for number, count in enumerate(seeds):
            of_family = rng.normal(0, family_sd)
            for seed in range(count):
                shift = of_family + rng.normal(0, 0.5)
                noise = 9.0 if number % 2 else 3.0
                models[f"m{number}_s{seed}"] = {
                    task: paired(shift + shared + rng.normal(0, noise, 60))
                    for task, shared in zip("tu", documents, strict=True)
                }
        yield models


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", nightly_but([(3, 1, 2)], [(3, 1, 2), (1, 1, 3, 2), (3, 2, 2, 1, 3)])
)
@pytest.mark.parametrize(("family_sd", "shared_sd"), [(2.0, 2.0), (1.0, 6.0), (0.0, 6.0), (0.5, 0)])
def test_the_wide_interval_covers(seeds: Sequence[int], family_sd: float, shared_sd: float) -> None:
    """Of 1,000 studies 930 intervals or more have the truth."""
    effects = map(pooled, replications(seeds, family_sd, shared_sd))
    intervals = [effect.interval(wide=True) for effect in effects]
    assert sum(low <= 0 <= high for low, high in intervals) >= 930


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ([(1.0, "acc_norm", {})], "acc", "of both sides differ in task.metric: acc_norm"),
        (
            [(0.5, "acc", {}), (1.0, "acc", {})],
            "acc",
            "the first side differ in gamma: 0.5 and 1.0",
        ),
        ([(1.0, "acc", {"batch_size": n}) for n in (4, 8)], "acc", "differ in batch_size: 4 and 8"),
        ([(1.0, "acc", {"shuffle": n}) for n in (0, 1)], "acc", ""),
    ],
)
def test_sides_that_do_not_compare_are_named(
    first: Sequence[tuple[float, str, dict[str, int]]], second: str, reason: str
) -> None:
    """Another metric, and γ as if these were seeds, entered the number without a word."""
    cells = [(create_method("score", gamma), metric, more) for gamma, metric, more in first]
    made = []
    for method, metric, more in (*cells, (create_method("baseline"), second, {})):
        of = records.cell(method, **more)
        of = dataclasses.replace(of, task=dataclasses.replace(of.task, metric=metric))
        made.append(records.record(of))
    results = results_of(made)
    is_stock = results.cells["method"] == "baseline"
    effect = contrast(results, results.cells[~is_stock], results.cells[is_stock])
    assert (effect.points is None) == bool(reason)
    assert [*effect.unpaired] == [("m", "obqa")] * bool(reason)
    assert reason in "".join(effect.unpaired.values())


def test_bits_per_byte_do_not_enter_points_of_accuracy() -> None:
    """A loss of bits is positive, so that it and a loss of accuracy cancelled."""
    made = []
    for method, rights in (("score", (1, 0, 0, 0)), ("baseline", (1, 1, 0, 0))):
        for name, metric in (("obqa", "acc"), ("piqa", "bits_per_byte")):
            of = records.cell(create_method(method, 1.0 if method == "score" else None), task=name)
            of = dataclasses.replace(of, task=dataclasses.replace(of.task, metric=metric))
            made.append(records.record(of, correct=rights if name == "obqa" else rights[::-1]))
    results = results_of(made)
    is_stock = results.cells["method"] == "baseline"
    effect = contrast(results, results.cells[~is_stock], results.cells[is_stock])
    assert effect.points == -25
    assert "bits_per_byte is no share" in effect.unpaired["m", "piqa"]
