"""Define a trace: which experts the router chose for which token."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from annotated_types import Predicate
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.knobs import check, says
from pydantic import Field

# Shape suffixes: T tokens, L MoE layers, K = top-k, S steps (forwards), E routed experts.

Array = npt.NDArray[Any]

Kind = Literal["prompts", "decode"]
"""What a step computes: tokens of prompts, or one token for each running request."""
KINDS: tuple[Kind, ...] = get_args(Kind)

ROWS = ("expert_TLK", "score_TLK", "step_T", "request_T", "load_SLE")
"""Arrays with a row for each token, or with counts alone for each step."""

STEP_TOKENS = 2048
"""Tokens of a step where a trace does not say which forward computed a token."""

_MOST_LOADS = 2**30  # numbers of steps × layers × experts in memory, 8 GiB
_AT_ONCE = 2**20  # pairs of a token and an expert that are looked at together: few, for the caches


MOST_EXPERTS = 2**12
"""Routed experts of a layer, twice those of the largest Switch Transformer."""

ExpertCount: TypeAlias = Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
Label: TypeAlias = Annotated[
    str,
    Field(min_length=1, max_length=1000),
    Predicate(str.isprintable),
    says("text in one line of at most 1,000 characters"),
]
_MOST_PAIRS = 2**46  # in counts alone: times ranks and slots they still are 64-bit integers
_HIGHEST_SCORE = float(np.finfo(np.float32).max)  # sums are of single precision


class Steps(NamedTuple):
    """Some consecutive steps of a trace."""

    load_SLE: Array  # int64 [steps, L, E]: pairs that the router sent to each expert
    tokens: slice  # their tokens; empty where a trace has counts alone


@dataclass(frozen=True, eq=False)
class Trace:
    """The router's choices, before any capacity: for every token, or only counted for every step.

    Exactly one of ``expert_TLK`` and ``load_SLE`` is there. Arrays are checked on creation, in
    bounded memory.

    Raises:
        UsageError: For arrays that cannot be; one line names the field, the value and the fix.
    """

    n_experts: int  # routed experts E of a layer; shared experts are none of them
    # Unsigned integers: a token's experts, in the router's order, no expert twice.
    expert_TLK: Array | None = None
    score_TLK: Array | None = None  # floats: the gate scores of those experts, at least 0
    # Integers: the forward that computed a token, from 0, non-decreasing; None if unknown.
    step_T: Array | None = None
    request_T: Array | None = None  # integers: the request (or sequence) of a token
    load_SLE: Array | None = None  # integers: pairs of each expert, where no more is known
    decode_S: Array | None = None  # booleans: whether a step is of decoding, not of prompts
    top_k: int | None = None  # experts K per token: those of expert_TLK; None of counts if unknown
    layers: tuple[str, ...] = ()  # of the MoE layers: names, or by default their numbers from 0
    model: str | None = None
    source: str = "unknown"  # origin in words, such as ``vllm`` or the path of a record
    ranks: int | None = None  # R, each with E/R consecutive experts; None if unknown
    _loads: Array | None = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if (self.expert_TLK is None) == (self.load_SLE is None):
            raise UsageError(
                "expert_TLK, load_SLE: a trace has exactly one of them: the experts of every token "
                "or the counts of every step"
            )
        check("n_experts", self.n_experts, ExpertCount)
        check("source", self.source, Label)
        check("model", self.model, Label | None)
        for name in ("top_k", "ranks"):
            value = check(name, getattr(self, name), ExpertCount | None)
            if value is not None and value > self.n_experts:
                raise UsageError(f"{name}={value}: must be at most n_experts={self.n_experts}")
        if self.ranks is not None:
            experts_per_rank(self.n_experts, self.ranks, "ranks")
        if self.load_SLE is None:
            self._check_tokens()
        else:
            for name in ("score_TLK", "step_T", "request_T"):
                if getattr(self, name) is not None:
                    raise UsageError(f"{name}: belongs to expert_TLK; counts alone have none")
            _check_counts(self.load_SLE, self.n_experts, self.top_k)
        self._check_kinds()
        n_layers = self._array.shape[1]
        if not self.layers:
            object.__setattr__(self, "layers", tuple(map(str, range(n_layers))))
        if len(self.layers) != n_layers:
            raise UsageError(f"layers: {len(self.layers)} names for {n_layers} layers; name each")
        for layer in self.layers:
            check("layers", layer, Label)

    def _check_tokens(self) -> None:
        ids = self.expert_TLK
        assert ids is not None
        if ids.ndim != 3 or not ids.size or ids.dtype.kind != "u":
            raise UsageError(
                f"expert_TLK: {ids.dtype} {list(ids.shape)}; must be unsigned integers [tokens, "
                "layers, top-k], none of which is 0; see capmoe_serve.trace.unsigned"
            )
        if self.top_k not in (None, ids.shape[2]):
            raise UsageError(f"top_k={self.top_k}: expert_TLK has {ids.shape[2]} experts per token")
        object.__setattr__(self, "top_k", int(ids.shape[2]))
        _check_shape("score_TLK", self.score_TLK, ids.shape, "f")
        for name in ("step_T", "request_T"):
            _check_shape(name, getattr(self, name), ids.shape[:1], "ui")
        for rows in self._rows():
            _check_ids(ids[rows], self.n_experts, rows.start)
            if self.score_TLK is not None:
                _check_scores(self.score_TLK[rows], rows.start)
        step_T = self.step_T
        if step_T is not None and (int(step_T[0]) < 0 or (np.diff(step_T.astype("i8")) < 0).any()):
            raise UsageError(
                "step_T: must begin at 0 or above and never fall; sort the tokens by step"
            )

    def _check_kinds(self) -> None:
        kinds = self.decode_S
        if kinds is None:
            return
        if self.expert_TLK is not None and self.step_T is None:
            raise UsageError("decode_S: says the kind of steps, which need step_T")
        if kinds.shape != (self.n_steps,) or kinds.dtype.kind != "b":
            raise UsageError(
                f"decode_S: {kinds.dtype} {list(kinds.shape)}; must be booleans [{self.n_steps}], "
                "one for each step that has a token"
            )

    @property
    def _array(self) -> Array:
        array = self.load_SLE if self.expert_TLK is None else self.expert_TLK
        assert array is not None
        return array

    @property
    def n_layers(self) -> int:
        """Number of MoE layers L."""
        return int(self._array.shape[1])

    @property
    def n_tokens(self) -> int | None:
        """Number of tokens T; None where counts alone are known, without K."""
        if self.load_SLE is None:
            return len(self._array)
        return None if self.top_k is None else int(self.load_SLE[:, 0].sum()) // self.top_k

    @property
    def n_steps(self) -> int:
        """Number of steps S that have a token; 1 where the steps of tokens are unknown."""
        return len(self._bounds()) - 1

    @property
    def decode_steps(self) -> int | None:
        """Number of steps of decoding; None where the kind of steps is not known."""
        return None if self.decode_S is None else int(self.decode_S.sum())

    def only(self, kind: Kind) -> Trace:
        """Return the steps of one kind, in memory.

        Raises:
            UsageError: If the trace does not say the kind of its steps, or has none of this.
        """
        if self.decode_S is None:
            raise UsageError(
                f"only={kind}: the trace does not say which steps are prompts and which decode "
                "steps; record it with save_trace=DIR, or leave --only out"
            )
        is_of_kind_S = self.decode_S == (kind == "decode")
        if is_of_kind_S.all():
            return self
        if not is_of_kind_S.any():
            raise UsageError(f"only={kind}: the trace has no such step; leave --only out")
        return self._part(np.repeat(is_of_kind_S, np.diff(self._bounds())), is_of_kind_S)

    def second_half(self) -> Trace:
        """Return the second half of the steps, or the whole of a single step."""
        if self.n_steps < 2:
            return self
        middle = self.n_steps // 2
        return self._part(slice(int(self._bounds()[middle]), None), slice(middle, None))

    def _part(self, rows: Array | slice, steps: Array | slice) -> Trace:
        """Return some steps; ``rows`` are their tokens, or the steps again of counts alone."""
        parts = {name: array[rows] for name in ROWS if (array := getattr(self, name)) is not None}
        kinds_S = None if self.decode_S is None else self.decode_S[steps]
        part = dataclasses.replace(self, **parts, decode_S=kinds_S)
        if self._loads is not None:
            object.__setattr__(part, "_loads", self._loads[steps])
        return part

    def _rows(self, first: int = 0, last: int | None = None) -> Iterator[slice]:
        """Yield slices of tokens of a bounded number of pairs."""
        _, n_layers, top_k = self._array.shape
        last = len(self._array) if last is None else last
        size = max(_AT_ONCE // (n_layers * top_k), 1)
        for start in range(first, last, size):
            yield slice(start, min(start + size, last))

    def _bounds(self) -> Array:
        """Return the first row of each step and the number of rows [S + 1].

        A row is a token, or with counts alone a step.
        """
        rows = len(self._array)
        if self.load_SLE is not None:
            return np.arange(rows + 1)
        if self.step_T is None:
            return np.array([0, rows])
        changes = np.flatnonzero(self.step_T[1:] != self.step_T[:-1]) + 1
        return np.concatenate([[0], changes, [rows]])

    def loads(self) -> Array:
        """Return the pairs that each expert got, int64 [S, L, E], and keep them for further uses.

        Raises:
            UsageError: If they are too many to be in memory.
        """
        if self._loads is None:
            steps, layers = self.n_steps, self.n_layers
            if steps * layers * self.n_experts > _MOST_LOADS:
                raise UsageError(
                    f"step tokens: {steps:,} steps × {layers} layers × {self.n_experts} experts "
                    "are too many counts for the memory; take more tokens a step (--step-tokens), "
                    "or a part of the trace"
                )
            loads = np.concatenate([part.load_SLE for part in self.by_steps()])
            loads.flags.writeable = False
            object.__setattr__(self, "_loads", loads)
        assert self._loads is not None
        return self._loads

    def by_steps(self) -> Iterator[Steps]:
        """Yield the loads of consecutive steps in parts of bounded memory."""
        size = max(_AT_ONCE // (self.n_layers * self.n_experts), 1)
        if self.expert_TLK is None:
            assert self.load_SLE is not None
            for first in range(0, len(self.load_SLE), size):
                yield Steps(self.load_SLE[first : first + size].astype(np.int64), slice(0, 0))
            return
        bounds, loads = self._bounds(), self._loads
        first = 0
        while first < len(bounds) - 1:
            # At least one step, at most `size` of them, and not many more tokens than at once.
            limit = bounds[first] + max(_AT_ONCE // (self.n_layers * self._array.shape[2]), 1)
            last = int(np.searchsorted(bounds, limit, side="right")) - 1
            last = min(max(last, first + 1), first + size)
            tokens = slice(int(bounds[first]), int(bounds[last]))
            steps = slice(first, last)
            load_SLE = self._count(bounds[first : last + 1]) if loads is None else loads[steps]
            yield Steps(load_SLE, tokens)
            first = last

    def _count(self, bounds: Array) -> Array:
        """Return the loads of the steps between some bounds."""
        assert self.expert_TLK is not None
        shape = (self.n_layers, self.n_experts)
        load_SX = np.zeros((len(bounds) - 1, math.prod(shape)), dtype=np.int64)
        first_L1 = (np.arange(shape[0]) * shape[1]).astype(np.uint32)[:, None]
        for step, (first, last) in enumerate(itertools.pairwise(bounds.tolist())):
            for rows in self._rows(first, last):
                cells = (first_L1 + self.expert_TLK[rows]).ravel()
                load_SX[step] += np.bincount(cells, minlength=load_SX.shape[1])
        return load_SX.reshape(-1, *shape)

    def in_steps(self, tokens: int) -> Trace:
        """Return the trace cut into steps of so many tokens, in the order of the file."""
        if self.expert_TLK is None:
            raise UsageError("step tokens: the trace has counts of steps; they cannot be cut anew")
        step_T, kinds = np.arange(len(self.expert_TLK)) // tokens, self.decode_S
        if kinds is not None:
            if kinds.any() != kinds.all():
                raise UsageError(
                    "step tokens: the trace has prompts and decode steps, which would be mixed; "
                    "add --only prompts or --only decode"
                )
            kinds = np.full(int(step_T[-1]) + 1, kinds[0])
        return dataclasses.replace(self, step_T=step_T, decode_S=kinds)


def in_known_steps(
    trace: Trace, tokens: int | None = None, only: Kind | None = None
) -> tuple[Trace, str | None]:
    """Return a trace that has steps, and in words how tokens were put into them if they were.

    They are if a number of tokens is given, and else, into :data:`STEP_TOKENS`, if the trace has no
    steps. ``only`` takes the steps of one kind.

    Raises:
        UsageError: If counts, or steps of both kinds, should be cut anew, or the kind of steps is
            asked for and not known.
    """
    if only is not None:
        trace = trace.only(only)
    if tokens is None and (trace.expert_TLK is None or trace.step_T is not None):
        return trace, None
    size = tokens or STEP_TOKENS
    words = f"assumed, {size} tokens in the order of the file (--step-tokens)"
    return trace.in_steps(size), words


def steps_in_words(steps: int, decode_steps: int | None) -> str:
    """Return a number of steps, and of which kind they are where that is known."""
    words = f"{steps:,} steps"
    if decode_steps is None:
        return words
    if decode_steps in (0, steps):
        return f"{words} of {'decoding' if decode_steps else 'prompts'}"
    return (
        f"{words}, {steps - decode_steps:,} of prompts and {decode_steps:,} of decoding together "
        "(--only prompts, --only decode)"
    )


def unsigned(ids: Array) -> Array:
    """Return integers of at least 0 in the smallest unsigned type that holds them.

    Raises:
        UsageError: If one is negative or they are no integers.
    """
    if ids.dtype.kind not in "ui" or not ids.size:
        raise UsageError(
            f"expert_TLK: {ids.dtype} {list(ids.shape)}; must be integers, at least one"
        )
    if (lowest := int(ids.min())) < 0:
        raise UsageError(f"expert_TLK={lowest}: the number of an expert must be at least 0")
    return ids.astype(np.min_scalar_type(int(ids.max())), copy=False)


def check_pairs(field: str, counts: Array) -> None:
    """Refuse counts of which sums would overflow."""
    if (pairs := float(counts.sum(dtype=np.float64))) > _MOST_PAIRS:
        raise UsageError(
            f"{field}: {pairs:.3g} pairs in all; counts may sum to {_MOST_PAIRS:.3g} at most"
        )


def _check_counts(load_SLE: Array, n_experts: int, top_k: int | None) -> None:
    """Refuse counts that cannot be [steps, layers, experts] of a trace."""
    if load_SLE.ndim != 3 or not load_SLE.size or load_SLE.dtype.kind not in "ui":
        raise UsageError(
            f"load_SLE: {load_SLE.dtype} {list(load_SLE.shape)}; must be integers [steps, layers, "
            "experts], none of which is 0"
        )
    if load_SLE.shape[2] != n_experts:
        raise UsageError(
            f"n_experts={n_experts}: load_SLE has {load_SLE.shape[2]} experts; set that"
        )
    if (lowest := load_SLE.min()) < 0:
        step, layer, _ = np.unravel_index(load_SLE.argmin(), load_SLE.shape)
        raise UsageError(
            f"load_SLE={lowest}: a count must be at least 0 (step {step}, layer {layer}); a "
            "counter of 32 bits may have overflowed: dump it more often"
        )
    check_pairs("load_SLE", load_SLE)
    if top_k is not None and (load_SLE.sum(axis=2) % top_k).any():
        raise UsageError(
            f"top_k={top_k}: a step's counts of a layer are no multiple of it; leave it out if "
            "tokens have no fixed number of experts"
        )


def _check_shape(field: str, array: Array | None, shape: tuple[int, ...], kinds: str) -> None:
    """Refuse an array that has not the tokens (layers, top-k) of the experts."""
    if array is not None and (array.shape != shape or array.dtype.kind not in kinds):
        numbers = "floats" if kinds == "f" else "integers"
        raise UsageError(
            f"{field}: {array.dtype} {list(array.shape)}; must be {numbers} {list(shape)}, as "
            "expert_TLK has them"
        )


def _check_ids(ids: Array, n_experts: int, first: int) -> None:
    """Refuse experts that do not exist or stand twice; ``first`` is the number of the first token.

    Ids are [tokens, layers, top-k].
    """
    if (highest := int(ids.max())) >= n_experts:
        raise UsageError(
            f"expert_TLK={highest}: experts are numbered from 0 to {n_experts - 1}; set "
            "n_experts to the routed experts of a layer"
        )
    id_KTL = np.ascontiguousarray(np.moveaxis(ids, 2, 0))  # to compare is much faster than to sort
    for one_TL, other_TL in itertools.combinations(id_KTL, 2):
        if (twice_TL := one_TL == other_TL).any():
            token, layer = (int(number) for number in np.argwhere(twice_TL)[0])
            twice = int(one_TL[token, layer])
            unrecorded = "" if twice else ", and a server leaves 0 where it recorded nothing"
            raise UsageError(
                f"expert_TLK: token {first + token} has expert {twice} twice in layer {layer}; a "
                f"router chooses an expert once{unrecorded}"
            )


def _check_scores(scores: Array, first: int) -> None:
    """Refuse gate scores that are none; ``first`` is the number of the first token."""
    fine = np.isfinite(scores) & (scores >= 0)
    if scores.dtype.itemsize > 4:
        fine &= scores <= _HIGHEST_SCORE
    if not fine.all():
        token, layer, place = (int(number) for number in np.argwhere(~fine)[0])
        raise UsageError(
            f"score_TLK={scores[token, layer, place]}: a gate score of token {first + token}, "
            f"layer {layer}; must be from 0 to {_HIGHEST_SCORE:.3g}"
        )
