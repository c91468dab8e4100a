"""Every wrong decision of these methods is refused by an invariant, as those of the suite's are."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capmoe_eval.routing.decision import Scores
from capmoe_eval.routing.registry import create_method
from tests.nightly import nightly_but
from tests.wrapper import models
from tests.wrapper.mutations import test_mutations
from tests.wrapper.mutations.mutation import (
    Mutation,
    Setting,
    capped,
    mutated_run,
    of_first_call,
    other_knobs,
    stage,
)
from tests.wrapper.mutations.slips import over_topk, regrouped
from tests.wrapper.mutations.stages import EXPERTS, MASKS, NUMBERS, SCORES, WHOLE
from torch import Tensor

# Shape suffixes: E experts, R ranks, N experts of a rank, T tokens, K = top-k, S slots.

# The real tokens of five sequences in two forwards. Few, whose experts are not all of them; of
# these both forwards have 8.
FEW = ((2, 1, 2, 2, 1), (1, 2, 2, 1, 2))
# More, of which a choice by the whole batch still depends: 16.
SOME = ((3, 4, 4, 3, 2), (4, 3, 2, 3, 4))


def _modalities(_model: Any, n_layers: int) -> list[Tensor]:
    """Return the modality of each expert; every other layer has it the other way round."""
    modality_E = torch.tensor([1, 1, 1, 0, 0, -1, -1, -1])
    return [modality_E * (-1) ** layer for layer in range(n_layers)]


def _placements(_model: Any, n_layers: int) -> list[Tensor]:
    """Return the experts of each rank [R, N], of even and of odd layers."""
    placed_2RN = torch.tensor([[[0, 3, 5, 6], [1, 2, 4, 7]], [[0, 1, 4, 7], [2, 3, 5, 6]]])
    return [placed_2RN[layer % 2] for layer in range(n_layers)]


def _similarities(model: Any, _n_layers: int) -> list[Tensor]:
    return models.similarities(model)


def _coarse_similarities(model: Any, _n_layers: int) -> list[Tensor]:
    """Return similarities of few values."""
    return [(5 * similarity_EE).round() / 5 for similarity_EE in models.similarities(model)]


def _calibrated(setting: Setting, calibration: Callable[[Any, int], list[Tensor]]) -> Setting:
    return dataclasses.replace(setting, calibration=calibration)


SETTINGS = {
    "device_drop eplb": _calibrated(
        capped("score", granularity="device", placement="eplb"), _placements
    ),
    "oea": Setting(create_method("oea", k0=1), lengths=FEW),
    "xshare": Setting(create_method("xshare", k0=0, expert_budget=0.45), lengths=SOME),
    "xshare device": Setting(
        create_method("xshare", k0=0, expert_budget=0.3, granularity="device", ep_size=2),
        lengths=FEW,
    ),
    "sere": _calibrated(
        Setting(create_method("sere", k0=1, min_similarity=0.6), lengths=FEW), _similarities
    ),
    "macs": _calibrated(capped("macs", family="llava"), _modalities),
}

STAGES = [
    *stage("a similarity is", "hook.decide(calibrated)", SCORES),
    *stage("the base of C is", "base_capacity->", WHOLE),
    *stage("the set of experts is", "assign_within(set_E)", MASKS),
    *stage("the demand is", "batch_demand->", NUMBERS),
    *stage("the budget is", "activation_budget->", WHOLE),
    *stage("primary experts are", "substitutes(primary_E)", MASKS),
    *stage("an expert is served by", "substitutes->", EXPERTS),
    *stage("the weight of a token is", "token_weights->", NUMBERS),
    *stage("a limit by weight is", "weighted_limits->", NUMBERS),
    *stage("images' share is", "weighted_limits(ratio_G)", NUMBERS),
    *stage("an expert's modality is", "weighted_limits(bias_E)", NUMBERS),
    *stage("hidden states are", "token_weights(hidden_TH)", NUMBERS),
    *stage("what fits is", "keep_until_full->", MASKS),
]
KNOBS: dict[str, list[Any]] = {
    "placement": ["contiguous"],
    "k0": [1, 2, 3],
    "expert_budget": [0.2, 0.6],
    "min_similarity": [0.0, 0.75, 1.0],
    "delta": [-0.1, 1.0],
    "reroute": ["none"],
    "load_updates": [1],
}


def _of_tokens(tokens: slice) -> Callable[[Scores, Any], Scores]:
    """Count the demand of some tokens alone."""

    def change(scores: Scores, _call: Any) -> Scores:
        parts = {field.name: getattr(scores, field.name) for field in dataclasses.fields(scores)}
        some = {name: part if part is None else part[tokens] for name, part in parts.items()}
        return Scores(**some)

    return change


def _coarse(setting: Setting) -> Setting:
    return _calibrated(setting, _coarse_similarities).under(min_similarity=0.6)


def _largest(_weight_TS: Tensor, call: Any) -> Tensor:
    """Give SERE's merged pair the largest of its weights instead of their sum."""
    slots = torch.arange(call.assignment.index_TS.shape[1])
    taken_TKS = call.weight_TK[:, :, None] * (call.assignment.slot_TK[:, :, None] == slots)
    return taken_TKS.amax(dim=1)


def _unweighted(decided: Any, call: Any) -> Any:
    """Decide by tokens that all weigh 1, and tell the true weights, where there are images."""
    if call.image_T is None:
        return decided
    unweighted = call.again(image_T=None, calibrated=None)
    return dataclasses.replace(unweighted, details=decided.details)


def _swapped(placed_RN: Tensor, _call: Any) -> Tensor:
    return placed_RN.flatten()[[4, *range(1, 4), 0, *range(5, 8)]].view(2, 4)


SLIPS = [
    Mutation(
        "a placement is read in its own order",
        "rank_of->",
        lambda _, call: call.placed_RL.flatten()[call.expert] // call.local,
    ),
    Mutation("two experts of a placement are swapped", "hook.decide(calibrated)", _swapped),
    Mutation("moved pairs have the weight of their new expert", "hook.combine->", over_topk),
    Mutation("pairs that meet have the larger weight", "hook.combine->", _largest),
    of_first_call("batch_demand"),
    of_first_call("LayerHook.calibrated_on"),
    of_first_call("token_weights"),
    *(
        Mutation(f"the demand is of {which}", "batch_demand(scores)", _of_tokens(tokens))
        for which, tokens in {"the first token": slice(1), "the first four": slice(4)}.items()
    ),
    Mutation(
        "the threshold itself is not enough",
        "substitutes(min_similarity)",
        lambda least, _: least + 1e-6,
        _coarse,
    ),
    Mutation("the bounds are Token Drop's", "hook.decide->", _unweighted),
    Mutation(
        "the ranks share their mean entropy",
        "token_weights(groups)",
        lambda groups, _: regrouped(0 * groups.group_T, groups, 1),
    ),
]
MUTATIONS = (*test_mutations.MUTATIONS, *STAGES, *other_knobs(KNOBS), *SLIPS)
LONG = ("oea", "sere", "macs")
REFUSED = dict(zip(SETTINGS, (195, 175, 195, 200, 170, 270), strict=True))


@pytest.mark.parametrize("method", nightly_but({"xshare", "sere"}, SETTINGS))
def test_every_wrong_decision_is_refused(method: str) -> None:
    test_mutations.every_wrong_decision_is_refused(SETTINGS[method], REFUSED[method], MUTATIONS)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*itertools.product(LONG, test_mutations.SCOPES)], ids=" ".join)
def test_a_fault_is_refused_in_the_first_forward_that_examines_it(case: tuple[str, str]) -> None:
    test_mutations.faults_are_refused_when_examined(SETTINGS[case[0]], case[1], MUTATIONS)


LASER = Setting(create_method("laser", peak_mass=1.0, viable_score=0.0))
SOME_OF_BEST = SETTINGS["xshare"].under(k0=1, expert_budget=0.9)


@pytest.mark.parametrize(
    ("setting", "wrong", "broken"),
    [
        *(
            (of, "kept pairs are: all", {"bound_holds", "overload_drops"})
            for of in SETTINGS.values()
        ),
        *(
            (of, "kept pairs are: without the first place", {"best_kept"})
            for of in (SETTINGS["oea"], SETTINGS["sere"], SOME_OF_BEST)
        ),
        (LASER, "other knobs: load_updates=1", {"pairs_as_defined"}),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_broken_rule_is_refused_by_its_invariant(
    setting: Setting, wrong: str, broken: set[str]
) -> None:
    """A bound where no layer is examined, too; LASER has none."""
    (mutation,) = (of for of in MUTATIONS if of.name == wrong)
    refused_by, *_ = mutated_run(mutation, setting, n_forwards=1, examined=setting is LASER)
    assert broken <= refused_by
