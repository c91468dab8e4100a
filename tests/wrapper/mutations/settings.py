"""The settings that mutations are applied in: tiny models under every method, and their runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method, method_class
from capmoe_eval.wrapper import session
from capmoe_eval.wrapper.layers import MoeLayer, find_moe_layers
from capmoe_eval.wrapper.observers import invariants
from tests.wrapper import images, models

# The real tokens of five sequences in two forwards. Both have 46, but the two ranks, the first
# three sequences and the others, have other numbers of them each time.
LENGTHS = ((12, 7, 10, 12, 5), (10, 12, 12, 7, 5))

Calibration = Callable[[Any, int], list[Tensor]]
"""Returns the calibrated tensor of each layer, from a model and the number of its layers."""


@dataclass(frozen=True)
class Setting:
    """A tiny model under a method, and the batches of two forwards."""

    method: Method
    family: str = "olmoe"
    lengths: tuple[tuple[int, ...], ...] = LENGTHS
    tied: bool = False  # the last router gives all experts of all tokens the same score
    calibration: Calibration | None = None  # of a method that needs one

    @property
    def has_images(self) -> bool:
        return self.family in images.FAMILIES

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def rule(self) -> str:
        """What is added to a token's top-k as a candidate."""
        return getattr(self.method, "candidates", "topk")

    @property
    def adds(self) -> bool:
        """Whether pairs may be added beside a token's own."""
        return self.rule != "topk" or self.name in ("token_reroute", "oea", "xshare", "macs")

    @property
    def is_capped(self) -> bool:
        """Whether a number of pairs is bounded."""
        return self.method.bounds_pairs

    @property
    def has_capacity(self) -> bool:
        return self.method.unit is not None

    @property
    def by_device(self) -> bool:
        return self.method.unit == "device"

    @property
    def by_score(self) -> bool:
        return self.is_capped and self.name not in ("order", "reverse_order", "random")

    def under(self, **knobs: Any) -> Setting:
        """Return the setting with other knobs of its method."""
        return dataclasses.replace(self, method=with_knobs(self.method, **knobs))


def of(family: str, **knobs: Any) -> Callable[[Setting], Setting]:
    """Make a world of another family of models, under other knobs of the method."""
    return lambda setting: dataclasses.replace(setting, family=family).under(**knobs)


GROUPED = of("deepseek_v3")


def tied(setting: Setting) -> Setting:
    """Return a model whose last router gives all pairs the same score."""
    return dataclasses.replace(setting, tied=True)


def with_knobs(method: Method, *, name: str | None = None, **knobs: Any) -> Method:
    """Return a method with other knobs, of those that it has, or of another name."""
    kind = type(method) if name is None else method_class(name)
    fields = {field.name for field in dataclasses.fields(kind)}
    return method.converted(kind, **{knob: knobs[knob] for knob in knobs.keys() & fields})


def capped(name: str, gamma: float = 0.7, family: str = "olmoe", **knobs: Any) -> Setting:
    return Setting(create_method(name, gamma, ep_size=2, **knobs), family)


SETTINGS = {
    "order": capped("order"),
    "reverse_order": capped("reverse_order"),
    "random": capped("random", seed=3),
    "score": capped("score"),
    "expert_drop": Setting(create_method("expert_drop")),
    "expanded_drop local": capped("expanded_drop"),
    "expanded_drop ranked": capped("expanded_drop", candidates="ranked", m=3),
    "expanded_drop global": capped("expanded_drop", candidates="global"),
    "expanded_drop protect_topk": capped("expanded_drop", protect_topk=True),
    "expanded_drop max_k": capped("expanded_drop", 0.9, candidates="global", max_k=True),
    "expanded_drop device": capped("expanded_drop", granularity="device"),
    "token_reroute": capped("token_reroute"),
    "device_drop": capped("score", granularity="device"),
    "score image_first": capped("score", family="llava", modality="image_first"),
    "score text_first": capped("score", family="llava", modality="text_first"),
}
"""The methods of the paper, each by a name."""


@functools.cache
def _model(family: str, tied: bool) -> tuple[Any, list[MoeLayer]]:
    model = (images if family in images.FAMILIES else models).make(family)
    layers = find_moe_layers(model)
    if tied:
        with torch.no_grad():
            layers[-1].router.weight.zero_()
    return model, layers


@functools.cache
def _calibrated(setting: Setting) -> list[Tensor] | None:
    model, layers = _model(setting.family, setting.tied)
    return None if setting.calibration is None else setting.calibration(model, len(layers))


@functools.cache
def _batches(setting: Setting) -> list[dict[str, Tensor]]:
    """Return the inputs of the forwards, which no forward changes."""
    if setting.has_images:
        inputs = images.batch(setting.family, (1, 2, 1, 0))
        return [inputs, {name: value.flip(0) for name, value in inputs.items()}]
    batches = []
    for number, lengths in enumerate(setting.lengths):
        tokens = models.batch(number, len(lengths), max(lengths))
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        batches.append({"input_ids": tokens, "attention_mask": mask.long()})
    return batches


Forward = list[tuple[Tensor, ...]]
"""What each layer's experts were called with, and what came out, and at last the logits."""


@dataclass
class Run:
    """The forwards of a run, of which the last may be cut short, and what refused it."""

    forwards: list[Forward] = dataclasses.field(default_factory=list)
    refused_by: set[str] = dataclasses.field(default_factory=set)

    def differences(self, other: Run) -> dict[int, int]:
        """Return the forwards that differ from another run, each with the first place that does.

        A place is the number of a layer, or their number if the logits alone differ.
        """
        first = {}
        for number, pair in enumerate(zip(self.forwards, other.forwards, strict=False)):
            for place, parts in enumerate(zip(*pair, strict=False)):
                if not all(map(torch.equal, *parts)):
                    first[number] = place
                    break
        return first


class Clock:
    """The number of the forward that runs."""

    now = 0


def _pairs(index_NS: Tensor, weight_NS: Tensor, n_experts: int) -> tuple[Tensor, ...]:
    """Return the number and the weight of each pair [N, E], and the weight of no pair [N]."""
    zero_NE = weight_NS.new_zeros(len(index_NS), n_experts + 1)
    count_NE = zero_NE.scatter_add(1, index_NS, torch.ones_like(weight_NS))
    weight_NE = zero_NE.scatter_add(1, index_NS, weight_NS)
    return count_NE[:, :n_experts], weight_NE


def run(
    setting: Setting,
    n_forwards: int | None = None,
    clock: Clock | None = None,
    *,
    examined: bool = True,
) -> Run:
    """Run the forwards of a setting until an invariant refuses one.

    If they are not ``examined``, they are as those between the examined ones of a long run.

    Args:
        setting: The setting, whose batches are run in turn.
        n_forwards: The number of forwards; one of each batch if there is none.
        clock: Has the number of the forward that runs.
        examined: Whether layers are examined as in any run, or in no forward.
    """
    model, layers = _model(setting.family, setting.tied)
    batches, clock = _batches(setting), clock or Clock()
    clock.now = 0
    done = Run()

    def note(experts: Any, call: tuple[Tensor, ...], output: Tensor) -> None:
        pairs = _pairs(call[1].clone(), call[2].clone(), experts.num_experts)
        done.forwards[-1].append((*pairs, output.clone()))

    with ExitStack() as stack:
        # Of a model that stays the same the layers are looked for once.
        stack.enter_context(mock.patch.object(session, "find_moe_layers", lambda _: layers))
        if not examined:
            stack.enter_context(mock.patch.object(invariants, "is_examined", lambda *_: False))
        meter = stack.enter_context(
            session.capacity_aware(
                model, setting.method, calibrated=_calibrated(setting), verify=False
            )
        )
        for layer in layers:
            handle = layer.experts.register_forward_hook(note, prepend=True)
            stack.callback(handle.remove)
        try:
            with torch.no_grad():
                for clock.now in range(n_forwards or len(batches)):
                    done.forwards.append([])
                    output = model(**batches[clock.now % len(batches)])
                    done.forwards[-1].append((output.logits,))
        except EnforcementError as error:
            done.refused_by.add(str(error))
    failed = {name for name, proof in meter.proofs().items() if proof["passed"] is False}
    done.refused_by = failed or done.refused_by
    return done


@functools.cache
def true_run(setting: Setting, n_forwards: int | None = None) -> Run:
    """Return the run of the code as it is."""
    return run(setting, n_forwards)
