"""One computation, one method: combinations of the knobs of every method against the definition.

Then single settings of the paper's methods: which are one, their labels, and what is refused; and
the identities, labels and digests of all committed records.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.routing.decision import Scores, group_tokens
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.registry import create_method, method_names
from tests.routing.problems import (
    Case,
    as_stated,
    combinations,
    decide,
    deciding_knobs,
    draw_scores,
    kept_pairs,
)

RESULTS = Path(__file__).parents[2] / "results"
GAMMAS = (0.0, 0.6, 1.0, 1.3, 2.0, 2.3, math.inf)
STREAM = (1, 2)
# Combinations that are tried of each method; nightly all are but those of Expanded Drop and MACS.
FEW, MOST = 300, 4000
CHANGES = 150  # of a knob

Pairs = frozenset[tuple[int, int]]
Inputs = tuple[Scores, torch.Tensor]  # scores, and the mask of the tokens that count


def inputs(number: int, n_experts: int, top_k: int, n_positions: int) -> Inputs:
    """Return scores of four sequences with pads: ties, a family's bias and masked experts."""
    generator = torch.Generator().manual_seed(number)
    counted_BS = torch.rand(4, n_positions, generator=generator) < 0.8
    counted_BS[:, 0] = True
    scores = draw_scores(
        generator,
        (int(counted_BS.sum()), n_experts),
        top_k,
        levels=1 if number % 10 == 4 else 3 if number % 2 else 1000,
        is_biased=number % 3 == 1,
        is_masked=number % 4 == 2,
        popularity=0.0 if number % 5 == 4 else 0.4,  # else more than K scores are the best
    )
    return scores, counted_BS


# K is 2 or 3: the knobs `k0` are at most 2.
SMALL = [inputs(number, 4 + 2 * (number % 2), 2 + number % 2, 3) for number in range(6)]


def of_method(method: Method, at: Inputs) -> Case:
    scores, counted_BS = at
    groups = group_tokens(counted_BS, ep_size=method.ep_size, scope=method.scope)
    # Little text where K is large: its added pairs do not fill all buckets.
    image_T = torch.arange(groups.n_tokens) % (3 + 9 * (scores.topk_TK.shape[1] - 1)) > 0
    return Case(scores, groups, counted_BS, method, image_T, seed=int(scores.topk_TK.sum()))


def decided(method: Method, at: Inputs) -> Pairs:
    return frozenset(kept_pairs(decide(of_method(method, at), STREAM)))


def methods_of(name: str, most: int) -> list[Method]:
    """Return methods with combinations of knobs, not in their canonical form."""
    settings = combinations(name, GAMMAS, most)
    methods = (as_stated(name, knobs, n_experts=4, top_k=2) for knobs in settings)
    return [method for method in methods if method is not None]


@pytest.mark.parametrize("most", [FEW, pytest.param(MOST, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", method_names())
def test_the_canonical_form_decides_as_the_knobs_that_were_stated(name: str, most: int) -> None:
    """As the definition of the stated method, and so does that method; its identity tells it."""
    draws = random.Random(name)
    decisions: dict[tuple[Method, int], Pairs] = {}
    methods = methods_of(name, most)
    assert len(methods) >= max(1, len(deciding_knobs(name)))
    for method in methods:
        canonical = method.canonical()
        number = draws.randrange(len(SMALL))
        at = SMALL[number]
        if at[0].score_TE.shape[1] % method.ep_size:
            number, at = 0, SMALL[0]
        if (canonical, number) not in decisions:
            decisions[canonical, number] = decided(canonical, at)
        expected = of_method(method, at).reference(STREAM)
        assert decisions[canonical, number] == expected, (method, canonical)
        if not canonical.is_stock:  # then the method may leave its decision open
            assert decided(method, at) == expected, method
        again = from_identity(canonical.identity())
        assert again == canonical == canonical.canonical()
        assert again.label == canonical.label
        assert str(again.identity()) == str(canonical.identity())


@pytest.mark.parametrize("name", method_names())
def test_a_knob_that_stays_has_an_effect(name: str) -> None:
    """Of two methods that differ in one knob, some batch tells the canonical forms apart."""
    draws = random.Random(name)
    # From γ=2 on, what max_k cuts from a device's load is seldom seen on so few tokens.
    gammas = tuple(gamma for gamma in GAMMAS if gamma < 2 or gamma == math.inf)
    knobs, told_apart = deciding_knobs(name), 0
    for first in combinations(name, gammas, CHANGES):
        if not knobs:
            break
        knob = draws.choice(list(knobs))
        seconds = [first | {knob: value} for value in knobs[knob]]
        methods = [as_stated(name, each, n_experts=12, top_k=2) for each in (first, *seconds)]
        method, *others = (None if method is None else method.canonical() for method in methods)
        # At γ=0 the ranks stay, for what a record counts of them.
        if method is None or method.uniform_gamma == 0:
            continue
        for other in {other for other in others if other not in (method, None)}:
            told_apart += 1
            differs = any(decided(method, at) != decided(other, at) for at in batches())
            assert differs, f"{method.identity()} and {other.identity()} decide alike"
    assert told_apart or not knobs


def batches() -> Iterator[Inputs]:
    for number in range(6, 80):
        yield inputs(number, 12, (2, 3, 6)[number % 3], (24, 6, 1, 12)[number % 4])


def from_identity(identity: dict[str, Any]) -> Method:
    knobs = dict(identity)
    return create_method(knobs.pop("method"), knobs.pop("gamma", None), **knobs)


Settings = tuple[str, Any, dict[str, Any]]
BY_DEVICE = {"granularity": "device", "protect_topk": True}
# A device's capacity of all pairs never binds, and weights are normalised.
NORMALISED = {"granularity": "device", "ep_size": 4, "renormalize": "always"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("baseline", 1.0, {"ep_size": 4, "seed": 3}), ("baseline", None, {})),
        (("score", 1, {"seed": 3, "m": 9, "rounds": 2}), ("score", "1.0", {})),
        (("score", None, {"layer_gammas": [1.5, 1.5]}), ("score", 1.5, {})),
        (("score", -0.0, {}), ("score", 0.0, {})),
        (("device_drop", 1.0, {}), ("score", 1.0, {"granularity": "device"})),
        (("device_drop", 8.0, {"ep_size": 8}), ("baseline", None, {})),
        (("token_reroute", 1.0, {"rounds": 1, "ep_size": 4}), ("score", 1.0, {"ep_size": 4})),
        (
            ("expanded_drop", 0.6, {"candidates": "ranked", **BY_DEVICE}),
            ("score", 0.6, {"granularity": "device"}),
        ),
        (
            ("expanded_drop", 0.0, {"ep_size": 8, "candidates": "ranked", "m": 3}),
            ("random", 0.0, {"ep_size": 8, "seed": 2, "modality": "text_first"}),
        ),
        (("expert_drop", 1.0, {"modality": "text_first"}), ("expert_drop", None, {})),
        (("score", math.inf, NORMALISED), ("baseline", None, {})),
        (("order", 9.0, {**NORMALISED, "scope": "sequence"}), ("score", 4.0, NORMALISED)),
        (("token_reroute", 9.0, {**NORMALISED, "rounding": "floor"}), ("score", 4.0, NORMALISED)),
    ],
)
def test_one_computation_is_one_method(first: Settings, second: Settings) -> None:
    """Of several methods; the property above is of one."""
    are_alike(first, second)


def are_alike(first: Settings, second: Settings) -> None:
    methods = [create_method(name, gamma, **knobs) for name, gamma, knobs in (first, second)]
    assert methods[0] == methods[1]
    # -0.0 equals 0.0 and reads otherwise.
    assert str(methods[0].identity()) == str(methods[1].identity())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # What a record counts: the loads of devices, and the tokens.
        (("score", 0.0, {"ep_size": 4}), ("score", 0.0, {"ep_size": 8})),
        (("score", 0.0, {"count_padding": True}), ("score", 0.0, {})),
        (("score", 0.0, {"decode": "constrained"}), ("score", 0.0, {})),
        (("score", 4.0, NORMALISED), ("baseline", None, {})),
        # m ≥ E-K adds all experts, but E and K are the model's.
        (("expanded_drop", 1.0, {"candidates": "ranked", "m": 999}), ("expanded_drop", 1.0, {})),
    ],
)
def test_what_decides_alike_may_stay_apart(first: Settings, second: Settings) -> None:
    are_different(first, second)


def are_different(first: Settings, second: Settings) -> None:
    methods = [create_method(name, gamma, **knobs) for name, gamma, knobs in (first, second)]
    assert methods[0] != methods[1]


def test_a_method_and_a_name_are_two_ways_to_the_same() -> None:
    assert TokenDrop(gamma=1, ep_size=8) == create_method("score", "1.0", ep_size=8)
    by_layer = TokenDrop(gamma=[1, 2.0], ep_size=2)
    assert by_layer == create_method("score", layer_gammas=[1.0, 2.0], ep_size=2)
    assert by_layer.factor.uniform is None
    assert by_layer.label == "score-by_layer-ep2"
    assert TokenDrop(gamma=1, count_padding=True).label == "score-g1-count_padding"
    assert by_layer.of_layer(1) == TokenDrop(gamma=2.0, ep_size=2)
    is_refused("ep_size=0: must be a whole number of at least 1", TokenDrop, gamma=1.0, ep_size=0)
    several = TokenDrop(gamma=[1, math.inf])
    assert several.identity()["layer_gammas"] == [1.0, "inf"]
    assert create_method("score", layer_gammas=(math.inf, math.inf)) == create_method("baseline")


@pytest.mark.parametrize("gammas", [[1.0], [1.0] * 3, [math.inf], [0.0] * 3, [8.0]])
def test_a_list_of_equal_factors_has_one_for_each_layer(gammas: list[float]) -> None:
    """Although it is the method of one factor, which may be the baseline."""
    settings = {"ep_size": 8, "granularity": "device"}
    method = create_method("score", layer_gammas=gammas, **settings)
    assert method == create_method("score", gammas[0], **settings)
    line = f"layer_gammas: {len(gammas)} capacity factors for 2 MoE layers"
    for each in (method, method.canonical()):
        is_refused(line, each.check_layers, 2, 8, 2)
        each.check_layers(len(gammas), 8, 2)
        if each.factor is not None:
            each.at(1.0).check_layers(2, 8, 2)


@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        (
            {"name": "score", "gamma": 1.0, "layer_gammas": [2.0, 2.0]},
            "gamma=1.0: layer_gammas has other factors; leave one out",
        ),
        ({"name": "score", "gamma": np.True_}, "gamma=True: the capacity factor must be"),
        ({"name": "score", "gamma": b"1"}, "gamma=b'1': the capacity factor must be"),
        ({"name": "score", "gamma": 1, "eq_size": 8}, "knob=eq_size: did you mean 'ep_size'?"),
        ({"name": "baseline", "layer_gammas": [1.0]}, "layer_gammas=[1.0]: method 'baseline' has"),
    ],
)
def test_bad_knobs_give_one_clear_line(knobs: dict[str, Any], line: str) -> None:
    is_refused(line, create_method, **knobs)


def is_refused(line: str, call: Callable[..., Any], *arguments: Any, **knobs: Any) -> None:
    with pytest.raises(UsageError) as error:
        call(*arguments, **knobs)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are in the repository alone")
def test_every_record_is_named_by_its_method() -> None:
    records = 0
    for path in (*record_paths(RESULTS / "zoo"), *record_paths(RESULTS / "real_text")):
        cell = dict(read_record(path).identity)
        method = from_identity(cell["method"])
        cell["method"] = method.identity()
        canonical = json.dumps(cell, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:10]
        assert path.name == f"{method.label}-{digest}.json"
        assert method.canonical() == method
        records += 1
    assert records > 3_000
