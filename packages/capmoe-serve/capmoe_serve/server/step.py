"""Plan one step of an engine: which of its rows are under the method, and of which phase each is.

A step computes rows of several requests, one after the other: the whole or a chunk of a prompt, or
the one token that was generated last. A row is of a prompt if its position lies within the prompt;
a chunk of one row may end a prompt, so that the number of a request's rows tells nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from capmoe_eval.routing.method import Method
from capmoe_eval.wrapper.plan import ForwardPlan
from torch import Tensor

# Shape suffixes: N rows of a step, T of them in one plan.


@dataclass(frozen=True)
class StepRows:
    """The rows of a step that are tokens; padding comes behind them."""

    requests: tuple[str, ...]  # ids, in the order of their rows
    scheduled: tuple[int, ...]  # rows of each request
    computed: tuple[int, ...]  # tokens of each request that earlier steps computed
    prompt: tuple[int, ...]  # length of each request's prompt

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return sum(self.scheduled)

    @cached_property
    def decode_N(self) -> Tensor:
        """True for a row behind the prompt of its request."""
        scheduled, computed, prompt = (
            np.array(of, dtype=np.int64) for of in (self.scheduled, self.computed, self.prompt)
        )
        before = scheduled.cumsum() - scheduled
        behind_N = np.arange(self.n_rows) + np.repeat(computed - before - prompt, scheduled)
        return torch.from_numpy(behind_N >= 0)

    @cached_property
    def request_N(self) -> Tensor:
        """The number of each row's request among those of the step."""
        return torch.repeat_interleave(torch.tensor(self.scheduled, dtype=torch.long))


class StepPlan(ForwardPlan):
    """The rows of one step that are under the method together, or those that are not."""

    rows_T: Tensor  # places of the rows in the step
    decode_T: Tensor  # True for a row behind the prompt
    request_T: Tensor  # the request of each row, by its number in ``step``
    step: StepRows

    def __init__(
        self, method: Method, number: int, step: StepRows, rows: Tensor, *, constrained: bool
    ) -> None:
        self.step, self._is_constrained = step, constrained
        self.decode_T, self.request_T = step.decode_N[rows], step.request_N[rows]
        self.rows_T = rows
        decode = bool(self.decode_T.all())
        counted_BS = torch.ones(1, len(rows), dtype=torch.bool)
        super().__init__(
            method,
            number=number,
            n_sequences=1,
            n_new=len(rows),
            prompt_length=len(rows),
            # As the check of forwards reads it: whether the method concerns these rows.
            is_prompt=constrained if method.decode == "unconstrained" else not constrained,
            counted_BS=counted_BS,
            decode=decode,
        )

    @property
    def constrained(self) -> bool:
        """True if the rows are under the method."""
        return self._is_constrained

    @property
    def live(self) -> Tensor:
        """The number of requests []: the rows of a step are one sequence of the call."""
        return torch.tensor(len(set(self.request_T.tolist())))

    def rows(self, value_N: Tensor) -> Tensor:
        """Return what the plan's rows [T, …] have of the values of every row of the step [N, …]."""
        if len(self.rows_T) == len(value_N):
            return value_N
        return value_N.index_select(0, self.rows_T.to(value_N.device))


def plan_step(method: Method, number: int, step: StepRows) -> Sequence[StepPlan]:
    """Return the plans of a step: of the rows under the method, and of the others.

    ``number`` is that of the first of them among all plans of the engine.
    """
    under_N = torch.ones(step.n_rows, dtype=torch.bool)
    if method.decode != "constrained":
        under_N = step.decode_N == (method.decode == "only")
    plans: list[StepPlan] = []
    for is_under in (True, False):
        rows = (under_N == is_under).nonzero().squeeze(1)
        if len(rows):
            plans.append(StepPlan(method, number + len(plans), step, rows, constrained=is_under))
    return plans
