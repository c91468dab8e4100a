"""Define a trace: which experts the router chose for which token; write it as ``.npz``, read it.

Nothing in a file is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from annotated_types import Predicate
from capmoe_eval.errors import UsageError, bad_choice, check_choice, reading, shown, writing
from capmoe_eval.experiment.files import whole_file
from capmoe_eval.routing.capacity import experts_per_rank
from capmoe_eval.routing.knobs import Count, check, says
from pydantic import Field

# Shape suffixes: T tokens, L MoE layers, K = top-k, S steps (forwards), E routed experts.

Array = npt.NDArray[Any]

Kind = Literal["prompts", "decode"]
"""What a step computes: tokens of prompts, or one token for each running request."""
KINDS: tuple[Kind, ...] = get_args(Kind)

ROWS = ("expert_TLK", "score_TLK", "step_T", "load_SLE")
"""Arrays with a row for each token, or with counts alone for each step."""

STEP_TOKENS = 2048
"""Tokens of a step where a trace does not say which forward computed a token."""

MOST_EXPERTS = 2**12
"""Routed experts of a layer, twice those of the largest Switch Transformer."""

ExpertCount: TypeAlias = Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
Label: TypeAlias = Annotated[
    str,
    Field(min_length=1, max_length=1000),
    Predicate(str.isprintable),
    says("text in one line of at most 1,000 characters"),
]
_MOST_LOADS = 2**30  # counts of steps × experts in memory, 8 GiB
_MOST_KEPT = 2**27  # counts of steps × layers × experts that are kept, 1 GiB
_MOST_PAIRS = 2**46  # in counts alone: times ranks and slots they still are 64-bit integers
_HIGHEST_SCORE = float(np.finfo(np.float32).max)  # sums are of single precision
_NUMBERS = {"u": "unsigned integers", "ui": "integers", "f": "floats", "b": "booleans"}


@dataclass(frozen=True, eq=False)
class Trace:
    """The router's choices, before any capacity: for every token, or only counted for every step.

    Exactly one of ``expert_TLK`` and ``load_SLE`` is there. Arrays are checked on creation, layer
    by layer.

    Raises:
        UsageError: For arrays that cannot be; one line names the field, the value and the fix.
    """

    n_experts: int  # routed experts E of a layer; shared experts are none of them
    # Unsigned integers: a token's experts, in the router's order, no expert twice.
    expert_TLK: Array | None = None
    score_TLK: Array | None = None  # floats: the gate scores of those experts, at least 0
    # Integers: the forward that computed a token, from 0, non-decreasing; None if unknown.
    step_T: Array | None = None
    load_SLE: Array | None = None  # integers: pairs of each expert, where no more is known
    decode_S: Array | None = None  # booleans: whether a step is of decoding, not of prompts
    top_k: int | None = None  # experts K per token: those of expert_TLK; None of counts if unknown
    layers: tuple[str, ...] = ()  # of the MoE layers: names, or by default their numbers from 0
    model: str | None = None
    source: str = "unknown"  # origin in words, such as ``vllm`` or the path of a record
    ranks: int | None = None  # R, each with E/R consecutive experts; None if unknown

    def __post_init__(self) -> None:
        if (self.expert_TLK is None) == (self.load_SLE is None):
            raise UsageError(
                "expert_TLK, load_SLE: a trace has exactly one of them: the experts of every token "
                "or the counts of every step"
            )
        check("n_experts", self.n_experts, ExpertCount)
        check("source", self.source, Label)
        check("model", self.model, Label | None)
        check("top_k", self.top_k, ExpertCount | None)
        check("ranks", self.ranks, ExpertCount | None)
        if self.ranks is not None:
            experts_per_rank(self.n_experts, self.ranks, "ranks")
        if self.expert_TLK is not None:
            self._check_tokens(self.expert_TLK)
        elif self.load_SLE is not None:
            self._check_counts(self.load_SLE)
        if self.decode_S is not None:
            if self.expert_TLK is not None and self.step_T is None:
                raise UsageError("decode_S: says the kind of steps, which need step_T")
            _check_array("decode_S", self.decode_S, "b", self.n_steps)
        if not self.layers:
            object.__setattr__(self, "layers", tuple(map(str, range(self.n_layers))))
        if len(self.layers) != self.n_layers:
            raise UsageError(
                f"layers: {len(self.layers)} names for {self.n_layers} layers; name each"
            )
        for layer in self.layers:
            check("layers", layer, Label)

    def _check_tokens(self, ids: Array) -> None:
        step_T = self.step_T
        _check_array("expert_TLK", ids, "u", "tokens", "layers", "top-k")
        if self.top_k not in (None, ids.shape[2]):
            raise UsageError(f"top_k={self.top_k}: expert_TLK has {ids.shape[2]} experts per token")
        object.__setattr__(self, "top_k", int(ids.shape[2]))
        if self.score_TLK is not None:
            _check_array("score_TLK", self.score_TLK, "f", *ids.shape)
        if step_T is not None:
            _check_array("step_T", step_T, "ui", len(ids))
            if int(step_T[0]) < 0 or (np.diff(step_T.astype("i8")) < 0).any():
                raise UsageError(
                    "step_T: must begin at 0 or above and never fall; sort the tokens by step"
                )
        for layer in range(ids.shape[1]):
            _check_ids(ids[:, layer], self.n_experts, layer)
            if self.score_TLK is not None:
                _check_scores(self.score_TLK[:, layer], layer)

    def _check_counts(self, load_SLE: Array) -> None:
        for name in ("score_TLK", "step_T"):
            if getattr(self, name) is not None:
                raise UsageError(f"{name}: belongs to expert_TLK; counts alone have none")
        _check_array("load_SLE", load_SLE, "ui", "steps", "layers", self.n_experts)
        if (lowest := load_SLE.min()) < 0:
            step, layer, _ = np.unravel_index(load_SLE.argmin(), load_SLE.shape)
            raise UsageError(
                f"load_SLE={lowest}: a count must be at least 0 (step {step}, layer {layer}); a "
                "counter of 32 bits may have overflowed: dump it more often"
            )
        check_pairs("load_SLE", load_SLE)
        is_of_tokens = self.top_k is None or not (load_SLE.sum(axis=2) % self.top_k).any()
        if not is_of_tokens or (self.top_k or 0) > self.n_experts:
            raise UsageError(
                f"top_k={self.top_k}: a step's counts of a layer are no multiple of it, or there "
                "are fewer experts; leave it out if tokens have no fixed number of experts"
            )

    @property
    def n_layers(self) -> int:
        """Number of MoE layers L."""
        array = self.load_SLE if self.expert_TLK is None else self.expert_TLK
        assert array is not None
        return int(array.shape[1])

    @property
    def n_tokens(self) -> int | None:
        """Number of tokens T; None where counts alone are known, without K."""
        if self.expert_TLK is not None:
            return len(self.expert_TLK)
        return None if self.top_k is None else int(self.load(0).sum()) // self.top_k

    @property
    def n_steps(self) -> int:
        """Number of steps S that have a token; 1 where the steps of tokens are unknown."""
        return int(self.place_T[-1]) + 1 if self.load_SLE is None else len(self.load_SLE)

    @property
    def decode_steps(self) -> int | None:
        """Number of steps of decoding; None where the kind of steps is not known."""
        return None if self.decode_S is None else int(self.decode_S.sum())

    @cached_property
    def place_T(self) -> Array:
        """The place of each token's step among those that have a token."""
        assert self.expert_TLK is not None
        if self.step_T is None:
            return np.zeros(len(self.expert_TLK), dtype=np.int64)
        return np.concatenate([[0], np.cumsum(self.step_T[1:] != self.step_T[:-1])])

    def load(self, layer: int) -> Array:
        """Return the pairs that each expert of a layer got in each step, int64 [S, E].

        They are kept for further uses, if they are few.

        Raises:
            UsageError: If they are too many to be in memory.
        """
        is_few = self.n_steps * self.n_layers * self.n_experts <= _MOST_KEPT
        return self._kept[layer] if is_few else self._counted(layer)

    @cached_property
    def _kept(self) -> list[Array]:
        return [self._counted(layer) for layer in range(self.n_layers)]

    def _counted(self, layer: int) -> Array:
        if self.load_SLE is not None:
            return self.load_SLE[:, layer].astype(np.int64)
        assert self.expert_TLK is not None
        shape = self.n_steps, self.n_experts
        if shape[0] * shape[1] > _MOST_LOADS:
            raise UsageError(
                f"step tokens: {shape[0]:,} steps × {shape[1]} experts are too many counts for the "
                "memory; take more tokens a step (--step-tokens), or a part of the trace"
            )
        cell_TK = self.place_T[:, None] * self.n_experts + self.expert_TLK[:, layer]
        return np.bincount(cell_TK.ravel(), minlength=shape[0] * shape[1]).reshape(shape)

    def loads(self) -> Array:
        """Return the pairs that each expert got, int64 [S, L, E]."""
        return np.stack([self.load(layer) for layer in range(self.n_layers)], axis=1)

    def only(self, kind: Kind) -> Trace:
        """Return the steps of one kind.

        Raises:
            UsageError: If the trace does not say the kind of its steps, or has none of
                this, and for another kind.
        """
        if self.decode_S is None:
            raise UsageError(
                f"only={kind}: the trace does not say which steps are prompts and which decode "
                "steps; record it with save_trace=DIR, or leave --only out"
            )
        check_choice("only", kind, get_args(Kind))
        is_of_kind_S = self.decode_S == (kind == "decode")
        if not is_of_kind_S.any():
            raise UsageError(f"only={kind}: the trace has no such step; leave --only out")
        return self._part(is_of_kind_S)

    def second_half(self) -> Trace:
        """Return the second half of the steps, or the whole of a single step."""
        return self._part(np.arange(self.n_steps) >= self.n_steps // 2)

    def _part(self, is_part_S: Array) -> Trace:
        """Return some of the steps."""
        rows = is_part_S if self.expert_TLK is None else is_part_S[self.place_T]
        parts = {name: array[rows] for name in ROWS if (array := getattr(self, name)) is not None}
        kinds_S = None if self.decode_S is None else self.decode_S[is_part_S]
        return dataclasses.replace(self, **parts, decode_S=kinds_S)

    def in_steps(self, tokens: int) -> Trace:
        """Return the trace cut into steps of so many tokens, in the order of the file.

        Raises:
            UsageError: If it has counts, or steps of both kinds, or ``tokens`` is below 1.
        """
        check("step tokens", tokens, Count)
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


def in_known_steps(trace: Trace, tokens: int | None = None, only: Kind | None = None) -> Trace:
    """Return a trace that has steps; its source says so where its tokens were put into them.

    They are if a number of tokens is given, and else, into :data:`STEP_TOKENS`, if the trace has no
    steps. ``only`` takes the steps of one kind.

    Raises:
        UsageError: If counts, or steps of both kinds, should be cut anew, or the kind of steps is
            asked for and not known.
    """
    if only is not None:
        trace = trace.only(only)
    if tokens is None and (trace.expert_TLK is None or trace.step_T is not None):
        return trace
    size = tokens or STEP_TOKENS
    remark = f"; assumed steps of {size} tokens in the order of the file (--step-tokens)"
    return dataclasses.replace(trace.in_steps(size), source=trace.source + remark)


def steps_in_words(steps: int, decode_steps: int | None) -> str:
    """Return a number of steps, and of which kind they are where that is known."""
    words = f"{steps:,} step{'s'[: steps != 1]}"
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


def _check_array(field: str, array: Array, kinds: str, *shape: int | str) -> None:
    """Refuse an array of other numbers or another shape; an axis with a name has any length."""
    fits = len(array.shape) == len(shape) and all(
        length == axis if isinstance(axis, int) else length > 0
        for length, axis in zip(array.shape, shape, strict=True)
    )
    if not fits or array.dtype.kind not in kinds:
        hint = "; capmoe_serve.trace.unsigned makes them" if kinds == "u" else ""
        raise UsageError(
            f"{field}: {array.dtype} {list(array.shape)}; must be {_NUMBERS[kinds]} "
            f"[{', '.join(map(str, shape))}], at least one{hint}"
        )


def _check_ids(id_TK: Array, n_experts: int, layer: int) -> None:
    """Refuse experts of a layer that do not exist or stand twice."""
    if (highest := int(id_TK.max())) >= n_experts:
        raise UsageError(
            f"expert_TLK={highest}: experts are numbered from 0 to {n_experts - 1}; give the "
            "routed experts of a layer (--experts, in Python n_experts)"
        )
    for first_T, second_T in itertools.combinations(id_TK.T, 2):  # faster than to sort
        if (is_twice_T := first_T == second_T).any():
            token = int(is_twice_T.argmax())
            twice = int(first_T[token])
            unrecorded = "" if twice else ", and a server leaves 0 where it recorded nothing"
            raise UsageError(
                f"expert_TLK: token {token} has expert {twice} twice in layer {layer}; a router "
                f"chooses an expert once{unrecorded}"
            )


def _check_scores(score_TK: Array, layer: int) -> None:
    """Refuse gate scores of a layer that are none."""
    is_score_TK = np.isfinite(score_TK) & (score_TK >= 0)
    if score_TK.dtype.itemsize > 4:
        is_score_TK &= score_TK <= _HIGHEST_SCORE
    if not is_score_TK.all():
        token, place = (int(number) for number in np.argwhere(~is_score_TK)[0])
        raise UsageError(
            f"score_TLK={score_TK[token, place]}: a gate score of token {token}, layer {layer}; "
            f"must be from 0 to {_HIGHEST_SCORE:.3g}"
        )


# The file of a trace.

SUFFIX: Final = ".npz"
SCHEMA: Final = 1
OWN_ARRAYS: Final = "counts or ids in arrays of your own see docs/how-to/record_traffic.md"
_ARRAYS: Final = (*ROWS, "decode_S")
_ABOUT: Final = ("n_experts", "top_k", "layers", "model", "source", "ranks")
_MOST_UNPACKED: Final = 2**32  # bytes of a compressed array, which a small file may stand for


def check_regular(path: Path) -> None:
    """Refuse a path that leads to no regular file: a pipe may never end, and a device never does.

    Raises:
        UsageError: For a pipe, a device or a socket; a missing file is left to who opens it.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{shown(path)}: no regular file; save the input in one")


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace whole, as ``.npz``, which numpy alone reads.

    Raises:
        UsageError: For another suffix, or if the file cannot be written.
    """
    _check_suffix(path)
    about = {name: getattr(trace, name) for name in _ABOUT}
    arrays = {name: array for name in _ARRAYS if (array := getattr(trace, name)) is not None}
    with writing("trace", path), whole_file(path) as file:
        np.savez(file, about=np.array(json.dumps({"schema": SCHEMA, **about})), **arrays)


def load_trace(path: Path) -> Trace:
    """Read a trace that :func:`save_trace` wrote; nothing in it is unpickled.

    Raises:
        UsageError: If it is no whole trace; one line names the file and what is wrong.
    """
    _check_suffix(path)
    check_regular(path)
    fix = "give a file that save_trace=DIR wrote, or copy it again"
    with reading(path, "not a whole trace of this suite", fix):
        with zipfile.ZipFile(path) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
        if "about.npy" not in sizes:
            raise UsageError(f"about is not in the archive; for {OWN_ARRAYS}")
        # An uncompressed array has its bytes in the file, so that only packed ones can surprise.
        largest = max(sizes, key=sizes.__getitem__)
        if sizes[largest] > max(_MOST_UNPACKED, path.stat().st_size):
            raise UsageError(
                f"{largest}: has {sizes[largest]:,} bytes, too many to unpack; save it "
                "uncompressed (numpy.savez)"
            )
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(str(arrays["about"]))
            content = {name: arrays[name] for name in _ARRAYS if name in arrays}
        newer = about.keys() - {"schema", *_ABOUT}
        if about["schema"] != SCHEMA or newer:
            raise UsageError(
                f"{min(newer, default='schema')}: the file is of another version of this suite; "
                "update it"
            )
        if not isinstance(layers := about["layers"], list):
            raise UsageError(f"layers={shown(layers)}: must be a list of names")
        del about["schema"]
        return Trace(**content, **about | {"layers": tuple(layers)})


def _check_suffix(path: Path) -> None:
    """Refuse a path without the suffix of a trace file of this suite."""
    if path.suffix != SUFFIX:
        raise bad_choice(f"{shown(path)}: format", path.suffix or "none", [SUFFIX])
