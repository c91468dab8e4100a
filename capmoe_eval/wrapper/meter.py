"""Hold the observers of a model under a capacity, and assemble their report."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.capacity import gamma_json
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.layers import MoeLayer
from capmoe_eval.wrapper.observers import Observer, Proof, Sums
from capmoe_eval.wrapper.observers.invariants import (
    DefinitionCheck,
    GateCheck,
    examination_seed,
    is_examined,
    is_under_method,
)
from capmoe_eval.wrapper.observers.loads import Loads, Modalities
from capmoe_eval.wrapper.plan import ForwardPlan

# Shape suffixes: B sequences, S positions of the batch.

_SHARED = ("violations", "pad_slots", "unenforced", "overloaded")
"""The sums of a proof to which several observers add."""


class Scope(threading.local):
    """The ``with`` blocks of a meter that a thread is in."""

    real_tokens_BS: Tensor | None = None  # the mask of Meter.real_tokens


class Meter:
    """Loads, drops and proofs of a model under :func:`capacity_aware`."""

    def __init__(
        self,
        layers: Sequence[MoeLayer],
        method: Method,
        expected_layers: int | None,
        calibrated: Sequence[Tensor] | None = None,
        *,
        examines: bool = True,
        samples: bool = False,
    ) -> None:
        # Whether some observers see the examined forwards alone, as in a server.
        self._samples, self._seed = samples, examination_seed(method)
        self.layers, self.method, self.calibrated = layers, method, calibrated
        self.ranks = layers[0].ranks
        self.forwards = 0  # of the model so far
        self.decode_forwards = 0  # those that were decode steps
        self._constrained = 0  # those under the method
        self._misplanned = 0  # those under it that should not be, or the other way round
        self._uncounted = 0  # those in which no token counted, though one is real
        self._all_pads = 0  # those in which no token counted, since none is real
        # In the order in which they see an event.
        self.observers: list[Observer] = [
            Loads(layers, method),
            GateCheck(layers),
            Modalities(layers, method),
            *method.observers(layers, calibrated),
        ]
        self._definition: DefinitionCheck | None = None
        if examines:  # the probes of a proof on entry are not compared with the definition
            self._definition = DefinitionCheck(layers, method, calibrated, self._seed)
            self.observers.append(self._definition)
        # Proofs on entry: γ=∞ gives the stock model; the kept-pairs kernel agrees with the stock's.
        self.stock_at_infinity: Proof = {"passed": None, "why": "not run"}
        self.kernel_agrees: Proof = {"passed": None, "why": "not run"}
        self.scope = Scope()
        self._expected_layers = expected_layers

    def examine_nothing(self) -> None:
        """Stop comparing forwards with the definition, to time the forwards of a long run."""
        if self._definition is not None:
            self.observers.remove(self._definition)
            self._definition = None

    def observe(self, observer: Observer) -> None:
        """Show the following forwards to another observer."""
        self.observers.append(observer)

    @contextmanager
    def real_tokens(self, mask_BS: Tensor) -> Iterator[None]:
        """Mark the real tokens of the forwards of a ``with`` block, without an attention mask.

        ``mask_BS`` is true or non-zero where the token is real. This is for right-padded batches of
        a causal model, which need no attention mask: the logits of real tokens are then those of an
        unmasked forward, bit for bit. It takes precedence over the model's ``attention_mask``.
        """
        before, self.scope.real_tokens_BS = self.scope.real_tokens_BS, mask_BS.bool()
        try:
            yield
        finally:
            self.scope.real_tokens_BS = before

    # A forward.

    def begin(self, plan: ForwardPlan) -> None:
        """Count a forward that begins, show it to the observers, and ask who wants its layers."""
        self.forwards += 1
        self.decode_forwards += plan.decode
        self._constrained += plan.constrained
        self._misplanned += plan.constrained != is_under_method(self.method.decode, plan)
        if plan.constrained and not plan.groups.n_tokens:
            real = torch.ones((), device=plan.counted_BS.device)
            if plan.mask_BM is not None:
                real = plan.mask_BM.sum()
            is_uncounted = int(plan.ranks.total(real)) > 0
            self._uncounted += is_uncounted
            self._all_pads += not is_uncounted
        for observer in self.observers:
            observer.begin(plan)
        asked = [observer for observer in self.observers if observer.wants(plan)]
        if self._samples and not is_examined(self._seed, self._constrained - 1):
            asked = [observer for observer in asked if not observer.is_sampled]
        plan.observers = asked

    def end(self, plan: ForwardPlan) -> None:
        """Show the end of a forward to every observer, and check all invariants.

        This waits for the device once.

        Raises:
            EnforcementError: If one is broken; the message names the layers and the invariants.
        """
        if self._misplanned:
            raise EnforcementError(
                f"capacity not enforced: forwards_planned ({self._misplanned} forwards are under "
                "the method that should not be, or the other way round)"
            )
        if self._uncounted:
            raise EnforcementError(
                "capacity not enforced: tokens_counted (no token of a forward counted, though its "
                "mask says that some are real)"
            )
        for observer in self.observers:
            observer.end(plan)
        if not plan.constrained:  # nothing was counted since the last check
            return
        faults = [fault for observer in self.observers for fault in observer.broken()]
        if not torch.stack([fault.to(faults[0].device) for fault in faults]).any():
            return
        details = []
        for number, layer in enumerate(self.layers):
            if breaches := [text for of in self.observers for text in of.breaches(number)]:
                details.append(f"{layer.name}: {', '.join(breaches)}")
        raise EnforcementError("capacity not enforced: " + "; ".join(details))

    # The report.

    def proofs(self) -> dict[str, Proof]:
        """Return the invariants with their counts, JSON-ready; ``docs/reference/invariants.md``."""
        hooked, expected = len(self.layers), self._expected_layers
        proofs = {
            "stock_at_infinity": self.stock_at_infinity,
            "every_layer_hooked": {
                "passed": expected in (None, hooked),
                "hooked": hooked,
                "expected": expected,
            },
            "kernel_agrees": self.kernel_agrees,
            "forwards_planned": {
                "passed": not self._misplanned if self.forwards else None,
                **({} if self.forwards else {"why": "there was no forward"}),
                "violations": self._misplanned,
                "checked": self.forwards,
            },
            "tokens_counted": self.proof(
                {"uncounted": self._uncounted}, checked=self._constrained, all_pads=self._all_pads
            ),
        }
        for observer in self.observers:
            proofs |= observer.proofs(self)
        return proofs

    def proof(
        self,
        faults: dict[str, int],
        why: str | None = None,
        *,
        checked: int | None = None,
        examined: bool = False,
        **counts: int,
    ) -> Proof:
        """Return an invariant with its faults and counts; null where nothing was checked.

        Args:
            faults: The number of faults, by its name.
            why: The reason why the invariant does not apply, if there is one.
            checked: How often every forward under the method was checked.
            examined: Whether some forwards are compared with the definition.
            **counts: What else was counted.
        """
        is_broken = any(faults.values())
        if not is_broken and not self._constrained:
            why = f"none of {self.forwards} forwards was under the method"
            why += f" (decode={self.method.decode})" if self.forwards else ""
        if not is_broken and why is not None:
            return {"passed": None, "why": why}
        outcome: Proof = {"passed": not is_broken, **faults, **counts}
        if checked is not None:
            outcome["checked"] = checked
        if examined:
            outcome["examined"] = {} if self._definition is None else self._definition.comparison
        return outcome

    def count(self, name: str) -> int:
        """Return a sum over all layers to which several observers may add."""
        return sum(observer.count(name) for observer in self.observers)

    def summary(self) -> dict[str, Any]:
        """Return the statistics over all layers and forwards, JSON-ready."""
        summary = {"forwards": self.forwards, "decode_forwards": self.decode_forwards}
        for observer in self.observers:
            summary |= observer.summary()
        return summary

    def report(self) -> dict[str, Any]:
        """Return summary, layers and proofs, JSON-ready; see ``docs/reference/records.md``."""
        layers = [self._layer(number) for number in range(len(self.layers))]
        return {"summary": self.summary(), "layers": layers, "proofs": self.proofs()}

    def _layer(self, number: int) -> dict[str, Any]:
        """Return the statistics of a layer, with its γ if the layers have different ones."""
        factor = self.method.factor
        report = {key: value for of in self.observers for key, value in of.layer(number).items()}
        sums = [of.sums[number] for of in self.observers if len(of.sums) > number]
        for name in _SHARED:
            report[name] = sum(part.count(name) for part in sums if isinstance(part, Sums))
        if factor is not None and factor.uniform is None:
            report["gamma"] = gamma_json(factor.of_layer(number))
        return report
