"""Known answers, naive tests beside the vectorised ones, and what must hold for any differences."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics as stdlib
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capmoe_eval.experiment.names import family, split_seed
from capmoe_eval.paper import statistics as paired
from capmoe_eval.paper.pairing import Floats, Paired, shares
from capmoe_eval.paper.statistics import (
    by_family,
    holm,
    mcnemar,
    pooled,
    sign_flip,
)
from tests.nightly import nightly_but

SCORES = st.sampled_from([-1.0, -2 / 3, -0.2, -1 / 15, 0.0, 1 / 3, 0.6, 1.0])
TASKS = st.lists(st.lists(SCORES, min_size=1, max_size=5), min_size=1, max_size=2)


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (7, 8, 1.0),
        (0, 6, 2 / 64),  # all six changed the same way
        (1, 7, 2 * (1 + 8) / 256),
        (2000, 0, 0.0),
    ],
)
def test_mcnemar_by_hand(gained: int, lost: int, p: float) -> None:
    assert mcnemar(gained, lost) == pytest.approx(p, abs=1e-300)


def naive_sign_flip(tasks: list[list[float]]) -> float:
    """The sign-flip test by its definition: every choice of signs, counted."""
    weights = [value / (len(task) * len(tasks)) for task in tasks for value in task]
    observed = abs(sum(weights))
    sums = [
        abs(sum(sign * weight for sign, weight in zip(signs, weights, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(weights))
    ]
    return sum(total >= observed - 1e-12 for total in sums) / len(sums)


def flipped(tasks: list[list[float]]) -> float:
    return sign_flip([np.array(task) for task in tasks])


@given(TASKS)
@settings(max_examples=80, deadline=None)
def test_means_of_right_and_wrong_are_tested_exactly(tasks: list[list[float]]) -> None:
    assert flipped(tasks) == pytest.approx(naive_sign_flip(tasks), abs=1e-12)


@given(TASKS)
@example([[-0.2, -0.2, -0.2, 0.6]])  # their sum is 5e-17
@settings(max_examples=30, deadline=None)
def test_drawn_signs_agree_with_all_of_them(tasks: list[list[float]]) -> None:
    exact = naive_sign_flip(tasks)
    with mock.patch.object(paired, "LATTICE", 0):
        # Four standard errors of 10,000 draws, and the one that counts itself.
        error = 4 * math.sqrt(exact * (1 - exact) / paired.DRAWS) + 2e-4
        assert flipped(tasks) == pytest.approx(exact, abs=error)


@pytest.mark.parametrize("lattice", [0, paired.LATTICE])
@given(tasks=TASKS, data=st.data())
@settings(max_examples=20, deadline=None)
def test_p_depends_on_the_differences_alone(
    lattice: int, tasks: list[list[float]], data: st.DataObject
) -> None:
    """Not on the order of tasks and documents, the side that is called first, or the unit."""
    shuffled = [data.draw(st.permutations(task)) for task in data.draw(st.permutations(tasks))]
    with mock.patch.object(paired, "LATTICE", lattice):
        p = flipped(tasks)
        for same in (shuffled, *([[x * value for value in t] for t in tasks] for x in (-1, 100))):
            assert flipped(same) == pytest.approx(p, rel=1e-9)


@pytest.mark.parametrize(
    ("ps", "corrected"),
    [([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]), ([], []), ([0.9, 0.8], [1.0, 1.0])],
)
def test_holm_by_hand(ps: list[float], corrected: list[float]) -> None:
    assert holm(ps) == pytest.approx(corrected)


# Effects.

Models = dict[str, dict[str, Paired]]


def difference(values: Sequence[float] | Floats, documents: str = "d") -> Paired:
    return Paired((("t", documents),), np.asarray(values, np.float64), np.zeros(len(values)))


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
        st.lists(SCORES, min_size=1, max_size=4).map(difference),
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
    models = {
        "a": {"t": difference(first), "u": difference(other)},
        "b": {"t": difference(second)},
    }
    on_both = first / 4 + second / 2
    expected = 100 * math.sqrt(on_both.var() / 40 + (other / 4).var() / 25)
    effect = pooled(models)
    assert effect.error == pytest.approx(expected)
    assert effect.worth == pytest.approx(100 * 0.75 / 40)
    assert effect.documents == 65


@given(st.integers(0, 30), st.integers(0, 30))
@example(0, 2)
def test_p_of_one_task_is_mcnemars_but_for_the_normal_curve(gained: int, lost: int) -> None:
    effect = pooled({"a": {"t": difference([1.0] * gained + [-1.0] * lost + [0.0] * 140)}})
    assert effect.points is not None
    # The correction leaves 0.0205 to the exact test at two against none, elsewhere half as much.
    assert effect.p(effect.points) == pytest.approx(mcnemar(gained, lost), abs=0.021)


def test_less_than_one_documents_worth_decides_nothing() -> None:
    """Every document but one is answered alike, by each of three families."""
    models = {name: {"t": difference([-1.0] + [0.0] * 9999)} for name in "abc"}
    effect = pooled(models)
    assert effect.p(effect.worth) == 1.0
    assert effect.p(effect.worth, wide=True) == 1.0
    assert effect.p(100 * effect.worth) < 1e-6


@pytest.mark.parametrize("wide", [False, True])
def test_p_is_that_of_the_interval_that_reaches_the_bound(wide: bool) -> None:
    rng = np.random.default_rng(6)
    effect = pooled({n: {"t": difference(rng.normal(0.05, 0.3, 20_000))} for n in "abc"})
    low, high = effect.interval(wide=wide)
    # The variance around the bound adds 1/20,000 of its square.
    assert effect.p((high - low) / 2 + effect.worth, wide=wide) == pytest.approx(0.05, abs=1e-4)


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
                    task: difference(shift + shared + rng.normal(0, noise, 60))
                    for task, shared in zip("tu", documents, strict=True)
                }
        yield models


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", nightly_but([(3, 1, 2)], [(3, 1, 2), (1, 1, 3, 2), (3, 2, 2, 1, 3)])
)
@pytest.mark.parametrize(("family_sd", "shared_sd"), [(2.0, 2.0), (1.0, 6.0), (0.0, 6.0), (0.5, 0)])
def test_the_interval_over_families_covers_and_the_bootstrap_did_not(
    seeds: Sequence[int], family_sd: float, shared_sd: float
) -> None:
    """Of 1,000 studies 930 intervals or more have the truth; those of a bootstrap over families
    have it in fewer, as few as three or five families allow."""
    rng = np.random.default_rng(1)
    covered = resampled = 0
    for models in replications(seeds, family_sd, shared_sd):
        effect = pooled(models)
        low, high = effect.interval(wide=True)
        covered += low <= 0 <= high
        families = np.array(list(by_family(effect.models).values()))
        means = families[rng.integers(len(seeds), size=(400, len(seeds)))].mean(axis=1)
        low, high = np.percentile(means, [2.5, 97.5])
        resampled += low <= 0 <= high
    assert covered >= 930
    assert resampled < 900


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.2])
def test_no_difference_is_rarely_one(share: float) -> None:
    """Answers that change at random, in either direction: p is below 5 % in 5 % of the studies."""
    rng = np.random.default_rng(2)
    chances = [share / 2, 1 - share, share / 2]
    rejected = 0
    for _ in range(2000):
        answers = rng.choice([-1.0, 0.0, 1.0], size=(2, 300), p=chances)
        effect = pooled({"a": {"t": difference(answers[0]), "u": difference(answers[1])}})
        rejected += effect.p(effect.points or 0.0) < 0.05
    # Three standard errors of a share of 5 % are 1.5 %.
    assert rejected / 2000 < 0.065


@pytest.mark.parametrize(
    ("name", "model", "seed"),
    [
        ("zoo_olmoe", "zoo_olmoe", None),
        ("zoo_olmoe_s1", "zoo_olmoe", 1),
        ("zoo_olmoe_seed12", "zoo_olmoe", 12),
        ("zoo_deepseek_v2", "zoo_deepseek_v2", None),
    ],
)
def test_a_models_name_may_end_in_its_training_seed(
    name: str, model: str, seed: int | None
) -> None:
    assert (family(name), split_seed(name)[1]) == (model, seed)
