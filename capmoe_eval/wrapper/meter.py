"""Collect load statistics and proofs of a whole model under a capacity."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.method import Method, as_json
from capmoe_eval.wrapper.bounds import WEIGHED, weight_summary
from capmoe_eval.wrapper.invariants.check import DefinitionCheck, described, is_examined
from capmoe_eval.wrapper.layer_meter import ACTIVATED, DECODED, SCALARS, LayerMeter, ratios
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.modality import MODALITIES
from capmoe_eval.wrapper.modality_meter import COUNTS
from capmoe_eval.wrapper.plan import ForwardPlan
from capmoe_eval.wrapper.ranks import ALONE
from capmoe_eval.wrapper.recorder import Observer

# Shape suffixes: B sequences, S positions of the batch.


class _Scope(threading.local):
    """The ``with`` blocks of a meter that a thread is in."""

    real_tokens_BS: Tensor | None = None
    is_aside = False


class Meter:
    """Loads, drops and proofs of a model under :func:`capacity_aware`."""

    def __init__(
        self,
        layers: list[MoeLayer],
        method: Method,
        expected_layers: int | None,
        calibrated: Sequence[Tensor] | None = None,
        *,
        examines: bool = True,
    ) -> None:
        self.method, self.calibrated = method, calibrated
        self.ranks = layers[0].ranks
        self.layers = [
            LayerMeter(of, method.of_layer(n), None if calibrated is None else calibrated[n])
            for n, of in enumerate(layers)
        ]
        factors = method.layer_gammas  # read here, and not as the decision reads them
        methods = [method] * len(layers) if factors is None else map(method.at, factors)
        self.definition = DefinitionCheck(layers, list(methods), calibrated)
        # Whether forwards are compared with the definition; the probes of a proof on entry are not.
        self.examines = examines
        self.forwards = 0  # of the model so far
        self.decode_forwards = 0  # those of them that were decode steps
        self._constrained = 0  # those under the capacity
        self.misplanned = 0  # those under it that should not be, or the other way round
        self._live: Tensor | int = 0  # sequences that counted, summed over constrained decode steps
        # Proofs on entry: γ=∞ gives the stock model; the kept-pairs kernel agrees with the stock's.
        self.stock_at_infinity: dict[str, Any] = {"passed": None, "why": "not run"}
        self.kernel_agrees: dict[str, Any] = {"passed": None, "why": "not run"}
        self._scope = _Scope()
        # Keeps the router's choices, or measures the layers, if that is asked for.
        self.recorder: Observer | None = None
        self._empty = {"uncounted": 0, "all_pads": 0}  # forwards in which no token counted
        self._expected_layers = expected_layers

    @property
    def real_tokens_BS(self) -> Tensor | None:
        """The mask of :meth:`real_tokens`, in this thread."""
        return self._scope.real_tokens_BS

    @property
    def is_aside(self) -> bool:
        """True if forwards of this thread are left alone."""
        return self._scope.is_aside

    @property
    def records_every_forward(self) -> bool:
        """True if forwards without a capacity are recorded, too."""
        return self.recorder is not None and self.recorder.every_forward

    @property
    def examines_next(self) -> bool:
        """True if the next forward under the method is compared with the definition."""
        return self.examines and is_examined(self._constrained)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the forwards of a ``with`` block without a capacity, and neither count nor check."""
        before, self._scope.is_aside = self._scope.is_aside, True
        try:
            yield
        finally:
            self._scope.is_aside = before

    @contextmanager
    def real_tokens(self, mask_BS: Tensor) -> Iterator[None]:
        """Mark the real tokens of the forwards of a ``with`` block, without an attention mask.

        ``mask_BS`` is true or non-zero where the token is real. This is for right-padded batches of
        a causal model, which need no attention mask: the logits of real tokens are then those of an
        unmasked forward, bit for bit. It takes precedence over the model's ``attention_mask``.
        """
        before, self._scope.real_tokens_BS = self._scope.real_tokens_BS, mask_BS.bool()
        try:
            yield
        finally:
            self._scope.real_tokens_BS = before

    def note_forward(self, plan: ForwardPlan, mask: Tensor | None, under_method: bool) -> None:
        """Count a forward, and whether any of its tokens counts.

        ``mask`` marks the real tokens, with all its columns; None if all are real.
        By the definition the forward is ``under_method``; the plan may say otherwise.
        """
        self.forwards += 1
        self.misplanned += plan.constrained != under_method
        self.decode_forwards += plan.decode
        if plan.decode and plan.constrained:
            self._live = self._live + self.ranks.total(plan.counted_BS.any(dim=1).sum())
        self._constrained += plan.constrained
        if plan.constrained and not plan.groups.n_tokens:
            real = torch.ones((), device=plan.counted_BS.device) if mask is None else mask.sum()
            self._empty["uncounted" if int(self.ranks.total(real)) else "all_pads"] += 1

    def check(self) -> None:
        """Check every invariant; this waits for the device once.

        Raises:
            EnforcementError: If one is broken; the message names the layers and the invariants.
        """
        if self.misplanned:
            raise EnforcementError(
                f"capacity not enforced: forwards_planned ({self.misplanned} forwards are under "
                "the method that should not be, or the other way round)"
            )
        if self._empty["uncounted"]:
            raise EnforcementError(
                "capacity not enforced: tokens_counted (no token of a forward counted, though its "
                "mask says that some are real)"
            )
        if self.ranks is not ALONE:  # all processes raise by the largest faults of any
            faults = torch.stack([layer.faults for layer in self.layers])
            for layer, worst in zip(self.layers, self.ranks.highest(faults), strict=True):
                layer.faults = worst
        broken = [layer.broken() for layer in self.layers]
        off = self.definition.faults
        is_off = any(faults.total() for faults in off)
        if is_off or torch.stack([n.to(broken[0].device) for n in broken]).any():
            details = [
                f"{layer.layer.name}: {', '.join(breaches)}"
                for layer, faults in zip(self.layers, off, strict=True)
                if (breaches := [*layer.breaches(), *described(faults)])
            ]
            raise EnforcementError("capacity not enforced: " + "; ".join(details))

    def _totals(self, *names: str) -> dict[str, int]:
        """Return sums of the layers' counts."""
        return {name: sum(layer.count(name) for layer in self.layers) for name in names}

    def proofs(self) -> dict[str, Any]:
        """Return the invariants of ``docs/methods.md`` with their counts, JSON-ready."""
        method, hooked, expected = self.method, len(self.layers), self._expected_layers
        layers = sum(layer.forwards for layer in self.layers)  # forwards of layers
        uncounted, all_pads = self._empty.values()
        names = ("violations", "unenforced", "overloaded", "pad_slots")
        violations, unenforced, overloaded, pad_slots = self._totals(*names).values()
        violations += self.definition.total("bound_holds")
        pad_slots += self.definition.total("pads_take_no_slot")
        unbounded = method.bound is None and not method.decides_by_batch
        no_slots = "without a capacity there are no slots" if method.is_stock else None
        if method.count_padding and not method.is_stock:
            no_slots = "count_padding: pads count like tokens"
        return {
            "bound_holds": self._invariant(
                {"violations": violations},
                "the method bounds nothing" if unbounded else None,
                checked=layers,
                examined=True,
            ),
            "stock_at_infinity": self.stock_at_infinity,
            "pads_take_no_slot": self._invariant(
                {"pad_slots": pad_slots}, no_slots, checked=layers, examined=True
            ),
            "overload_drops": self._invariant(
                {"violations": unenforced},
                None if overloaded else "no load exceeded its bound",
                checked=layers,
                overloaded=overloaded,
            ),
            **{
                name: self._invariant({"violations": self.definition.total(name)}, examined=True)
                for name in ("pairs_valid", "pairs_as_defined", "weights_as_defined")
            },
            "gate_as_read": self._invariant(
                {"violations": sum(map(LayerMeter.misreads_gate, self.layers))}, checked=layers
            ),
            "every_layer_hooked": {
                "passed": expected in (None, hooked),
                "hooked": hooked,
                "expected": expected,
            },
            "forwards_planned": {
                "passed": not self.misplanned if self.forwards else None,
                **({} if self.forwards else {"why": "there was no forward"}),
                "violations": self.misplanned,
                "checked": self.forwards,
            },
            "tokens_counted": self._invariant(
                {"uncounted": uncounted}, checked=self._constrained, all_pads=all_pads
            ),
            "kernel_agrees": self.kernel_agrees,
            **({"modality_order": self._modality_order(layers)} if self._has_images else {}),
            **({"best_kept": self._best_kept(layers)} if method.bounds_activation else {}),
        }

    def _invariant(
        self,
        faults: dict[str, int],
        why: str | None = None,
        *,
        checked: int | None = None,
        examined: bool = False,
        **counts: int,
    ) -> dict[str, Any]:
        """Return an invariant with its faults and counts; null where nothing was checked.

        Args:
            faults: The number of faults, by its name.
            why: The reason why the invariant does not apply, if there is one.
            checked: How often every forward under the method was checked.
            examined: Whether some forwards are compared with the definition.
            **counts: What else was counted.
        """
        broken = any(faults.values())
        if not broken and not self._constrained:
            why = f"none of {self.forwards} forwards was under the method"
            why += f" (decode={self.method.decode})" if self.forwards else ""
        if not broken and why is not None:
            return {"passed": None, "why": why}
        outcome: dict[str, Any] = {"passed": not broken, **faults, **counts}
        if checked is not None:
            outcome["checked"] = checked
        if examined:
            check, forwards = self.definition, self._constrained
            compared = {"forwards": check.forwards, "of": forwards, "buckets": check.buckets}
            outcome["examined"] = compared
        return outcome

    @property
    def _has_images(self) -> bool:
        """True if a token of an image was counted."""
        return any(layer.has_images for layer in self.layers)

    def _modality_order(self, checked: int) -> dict[str, Any]:
        wrong, spared, lost = self._totals("wrong_modality", "spared", "protected_lost").values()
        why = "no modality is dropped first" if self.method.modality == "uniform" else None
        return self._invariant(
            {"violations": wrong}, why, checked=checked, spared=spared, protected_lost=lost
        )

    def _best_kept(self, checked: int) -> dict[str, Any]:
        fits, lost = self._totals("best_fits", "best_lost").values()
        why = None if fits else "the tokens' k0 best experts never fitted the budget"
        return self._invariant({"violations": lost}, why, checked=checked, fits=fits)

    def _reports(self) -> list[dict[str, Any]]:
        """Return the layers' statistics; the γ of each where the layers have several."""
        if self.method.layer_gammas is None:
            return [layer.report() for layer in self.layers]
        return [layer.report() | {"gamma": as_json(layer.method.gamma)} for layer in self.layers]

    def summary(self) -> dict[str, Any]:
        """Return the statistics over all layers and forwards, JSON-ready."""
        layers = self._reports()
        total = self._totals(*SCALARS, *ACTIVATED)
        forwards = max(sum(layer.forwards for layer in self.layers), 1)

        def peak(when: str, kind: str) -> list[float]:
            return [of["peak"][f"expert_{when}"][kind] for of in layers if of["peak"]]

        return {
            "forwards": self.forwards,
            "decode_forwards": self.decode_forwards,
            "tokens": max(layer["tokens"] for layer in layers),
            **{name: total[name] for name in ("dropped", "added", "lost_all")},
            **ratios(total, self.method),
            "peak_before": max(peak("before", "max"), default=None),
            "peak_after": max(peak("after", "max"), default=None),
            "mean_peak_before": _mean(peak("before", "mean")),
            "mean_peak_after": _mean(peak("after", "mean")),
            **{name: total[name] / forwards for name in ACTIVATED},
            **({"modalities": _by_modality(layers)} if self._has_images else {}),
            **self._decode_steps(),
            **({"weights": self._weights()} if self.method.weighs_tokens else {}),
        }

    def _weights(self) -> dict[str, object]:
        """Return the weights of tokens, and the modalities of the experts of all layers."""
        return weight_summary(self._totals(*WEIGHED), torch.cat(list(self.calibrated or ())))

    def _decode_steps(self) -> dict[str, Any]:
        """Return the statistics of decode steps alone, if there were any under the capacity."""
        if self.method.decode == "unconstrained" or not self.decode_forwards:
            return {}
        total = self._totals(*(f"decode_{name}" for name in DECODED))
        assignments = max(total["decode_assignments"], 1)
        effective = total["decode_slots"] / assignments if self.method.is_capped else None
        steps = self.decode_forwards * len(self.layers)
        return {
            "decode": {
                "live": int(self._live) / self.decode_forwards,
                "drop_rate": total["decode_dropped"] / assignments,
                "effective_gamma": effective,
                **{name: total[f"decode_{name}"] / steps for name in ACTIVATED},
            }
        }

    def report(self) -> dict[str, Any]:
        """Return summary, layers and proofs, JSON-ready; see ``docs/results.md``."""
        return {
            "summary": self.summary(),
            "layers": self._reports(),
            "proofs": self.proofs(),
        }


def _by_modality(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over layers of each modality; its tokens are those of one layer."""
    found = {}
    for name in MODALITIES:
        parts = [layer["modalities"][name] for layer in layers]
        asked = sum(sum(part["load_before"]) for part in parts)
        total = {count: sum(part[count] for part in parts) for count in COUNTS}
        tokens = max(part["tokens"] for part in parts)
        drop_rate = total["dropped"] / max(asked, 1)
        found[name] = total | {"tokens": tokens, "drop_rate": drop_rate}
    return found


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
