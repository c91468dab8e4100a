"""What the paper claims, as data: which two ways to route are compared, and what is expected.

A contrast compares the scores of two sides on the same documents. The capacity that both sides have
is that of the model's own emulated ranks, so :class:`Side` does not say ``ep_size``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from capmoe_eval.routing.method import Method

MARGIN = 1.0
"""Points of accuracy that count as nearly nothing."""

Composition = Literal["single", "mixed", "sized"]


@dataclass(frozen=True)
class Side:
    """One way to route.

    Attributes:
        name: A name of :data:`capmoe_eval.routing.method.METHODS`.
        gamma: Capacity factor, or None for a method without one.
        knobs: Other fields of :class:`Method`; all seeds of ``random`` belong to one side.
    """

    name: str
    gamma: float | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)

    def key(self, ep_size: int) -> tuple[tuple[str, Any], ...]:
        """Return what :func:`method_key` gives for this side on a model of so many ranks."""
        return method_key(Method(self.name, self.gamma, ep_size=ep_size, **self.knobs))


def method_key(method: Method) -> tuple[tuple[str, Any], ...]:
    """Return a method's identity without its ranks and its seed."""
    identity = method.identity()
    return tuple((k, v) for k, v in identity.items() if k not in ("ep_size", "seed"))


@dataclass(frozen=True)
class Contrast:
    """Two sides and what the paper says of their difference.

    Attributes:
        one: The side that the paper has ahead, or the one that should lose nearly nothing.
        other: The side that it is compared with.
        expect: ``greater``: one is better than other. ``close``: one is at most :data:`MARGIN`
            points worse than other.
        batches: ``single``: batches of one task, by length, as lm-eval has them. ``mixed``: random
            batches of four tasks. ``sized``: batches of four tasks by length, of several sizes.
    """

    one: Side
    other: Side
    expect: Literal["greater", "close"] = "greater"
    batches: Composition = "single"


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        key: Its letter.
        place: Where the paper makes it.
        statement: What it says, in our words.
        contrasts: The paired comparisons that test it.
        measure: Name of the function of ``measures`` that tests the part of it which no score can,
            or None.
    """

    key: str
    place: str
    statement: str
    contrasts: tuple[Contrast, ...] = ()
    measure: str | None = None


BASELINE: Final = Side("baseline")
KEEPS: Final = ("random", "reverse_order", "order")


def _score(gamma: float) -> Side:
    return Side("score", gamma)


def _expanded(gamma: float = 1.0, **knobs: Any) -> Side:
    return Side("expanded_drop", gamma, knobs)


def _device(name: str, gamma: float) -> Side:
    return Side(name, gamma, {"granularity": "device"})


_VARIANTS: Final[tuple[dict[str, Any], ...]] = tuple(
    {"candidates": candidates, "protect_topk": protect, "max_k": most}
    for candidates in ("local", "ranked", "global")
    for protect in (False, True)
    for most in (False, True)
)

CLAIMS: Final = (
    Claim(
        "a",
        "Table 1, §5.2",
        "Whom to drop: by score is better than at random, in order or in reverse order.",
        (
            *(
                Contrast(_score(gamma), Side(keep, gamma))
                for gamma in (1.0, 1.5, 2.0)
                for keep in KEEPS
            ),
            *(Contrast(_score(1.0), Side(keep, 1.0), batches="mixed") for keep in KEEPS),
        ),
    ),
    Claim(
        "a2",
        "Table 1",
        "Random is better than order, and so is reverse order.",
        (
            *(
                Contrast(Side(keep, gamma), Side("order", gamma))
                for gamma in (1.0, 1.5, 2.0)
                for keep in ("random", "reverse_order")
            ),
            Contrast(Side("random", 1.0), Side("order", 1.0), batches="mixed"),
        ),
    ),
    Claim(
        "b",
        "Figure 12, §5.2",
        "Token Drop at γ ≥ 2 costs nearly nothing; without capacity the model collapses.",
        (
            *(Contrast(_score(gamma), BASELINE, "close") for gamma in (2.0, 2.5, 3.0)),
            *(Contrast(BASELINE, _score(gamma)) for gamma in (0.0, 0.25, 0.5)),
        ),
    ),
    Claim(
        "b2",
        "Table 2, §5.2",
        "γ = 1.5 costs nearly nothing, too.",
        (Contrast(_score(1.5), BASELINE, "close"),),
    ),
    Claim(
        "c",
        "Table 2, Table 11",
        "Expanded Drop, in all its variants, is at least as good as Token Drop.",
        (
            *(Contrast(_expanded(**knobs), _score(1.0), "close") for knobs in _VARIANTS),
            Contrast(_expanded(), _score(1.0), "close", "mixed"),
        ),
    ),
    Claim(
        "c2",
        "Table 2, abstract",
        "Expanded Drop is better than Token Drop.",
        (
            *(
                Contrast(_expanded(gamma, candidates=candidates), _score(gamma))
                for gamma in (0.5, 1.0)
                for candidates in ("local", "ranked", "global")
            ),
            Contrast(_expanded(), _score(1.0), batches="mixed"),
        ),
    ),
    Claim(
        "d",
        "Table 2",
        "Expert Drop removes fewer assignments than Token Drop and costs more.",
        (
            Contrast(_score(1.0), Side("expert_drop")),
            Contrast(_score(1.5), Side("expert_drop")),
            Contrast(_score(2.0), Side("expert_drop")),
            Contrast(_score(1.0), Side("expert_drop"), batches="mixed"),
        ),
        measure="removed",
    ),
    Claim(
        "e",
        "Table 3, §5.4",
        "A capacity of each device is at least as good as one of each expert.",
        (
            *(
                Contrast(_device(name, gamma), Side(name, gamma), "close")
                for name in ("score", "expanded_drop")
                for gamma in (0.5, 1.0, 1.5)
            ),
            Contrast(_device("expanded_drop", 1.0), _expanded(1.5), "close"),
        ),
    ),
    Claim(
        "f",
        "Figures 1, 2, 13",
        "Models trained from scratch are less balanced than upcycled ones.",
        measure="balance",
    ),
    Claim(
        "g",
        "Figure 8",
        "Gate scores go on falling gently beyond the top-k: there is no cliff behind it.",
        measure="decay",
    ),
    Claim(
        "h",
        "v1, Figure 7",
        "Token Reroute gains with its rounds.",
        (
            *(
                Contrast(Side("token_reroute", 1.0, {"rounds": rounds}), _score(1.0))
                for rounds in (2, 3, 4)
            ),
            Contrast(Side("token_reroute", 0.5), _score(0.5)),
        ),
    ),
    Claim(
        "i",
        "beyond the paper",
        "Pads that take capacity cost accuracy; under a capacity an answer depends on its batch.",
        tuple(
            Contrast(Side(keep, gamma), Side(keep, gamma, {"count_padding": True}))
            for keep in ("score", "order")
            for gamma in (0.5, 1.0)
        ),
        measure="companions",
    ),
)
"""The claims of the replication, in order."""
