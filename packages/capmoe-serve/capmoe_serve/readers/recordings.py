"""Read SGLang's recordings: the ``.pt`` of its recorder, older ``.csv``, and ``.json`` of counts.

The recorder of expert distributions: ``python/sglang/srt/eplb/expert_distribution.py`` of
sgl-project/sglang (commit 02295fe5), ``_StatAccumulator.dump`` and ``_DetailAccumulator.dump``;
``forward_mode`` is a ``ForwardMode`` of ``python/sglang/srt/model_executor/forward_batch_info.py``
(commit 003bbaf9). Before it, ``dump_record`` of ``python/sglang/srt/managers/
expert_distribution.py`` wrote a ``.csv`` for each rank, ``layer_id,expert_id,count``, with rank and
time in its name. ``logical_count`` in a ``.json`` is what ``--init-expert-location`` reads
(``compute_initial_expert_location_metadata`` of ``expert_location.py``, commit 01fec5c).
"""

import pickle
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from capmoe_eval.errors import UsageError, first_line, reading, shown
from capmoe_eval.lazy import pd, torch
from capmoe_eval.routing.knobs import check

from capmoe_serve.trace import Array, ExpertCount, Trace, check_pairs, check_regular, unsigned

_MAP = "last_physical_to_logical_map"
_IDS, _COUNT = "topk_ids_of_layer", "global_physical_count"
_NAME = re.compile(r"rank(\d+)_timestamp([\d.]+)\.csv$")

# Shape suffixes: S steps, R records or rows, L layers of the model (dense ones, too), P physical
# experts (with redundant copies), E logical experts, T tokens, K places (8, whatever the top-k).


RECORDINGS: Final = (".pt", ".csv")
"""How the names of recordings end, those of today's recorder first."""


def read_recordings(paths: Sequence[Path], n_experts: int | None, top_k: int | None) -> Trace:
    """Read one recording, or those of several ranks, of one kind."""
    for path in paths:
        check_regular(path)
    if paths[0].suffix == ".pt":
        return read_sglang(paths, n_experts)
    return read_csv(paths, n_experts, top_k)


def read_sglang(paths: Sequence[Path], n_experts: int | None = None) -> Trace:
    """Read a recording of any mode: ``stat`` and ``per_pass`` count, ``per_token`` has the experts.

    - ``stat``: ``logical_count`` [S, L, E], summed over all ranks by the server itself. Its buffer
      is circular unless ``--expert-distribution-recorder-buffer-size -1``: steps may be rotated.
    - ``per_token``: ``records``, a dictionary for each forward with ``topk_ids_of_layer`` [L, T, K]
      of physical experts and its ``forward_mode``; ``per_pass``: with ``global_physical_count``
      [L, P]. Both are of one rank. ``last_physical_to_logical_map`` [L, P] makes logical experts of
      the physical ones.

    Several files are of different ranks: what they computed in one pass is one step. Layers and
    steps in which nothing was counted are left out; ``layers`` numbers the others.

    Raises:
        UsageError: If one is no such file, or two are of one rank; a line names it and the field.
    """
    fix = (
        "give a file that SGLang's /dump_expert_distribution_record wrote, after requests were "
        "served"
    )
    contents: list[Mapping[str, Any]] = []
    for path in paths:
        content = load_tensors(path)
        if not isinstance(content, Mapping) or not (
            "logical_count" in content or content.get("records")
        ):
            raise UsageError(f"{path}: has neither logical_count nor records; {fix}")
        contents.append(content)
    place = paths[0] if len(paths) == 1 else paths[0].parent
    with reading(place, "unexpected layout", fix):
        if len(contents) == 1 and "logical_count" in contents[0]:
            return counted(array("logical_count", contents[0]["logical_count"]), "sglang stat")
        if any("logical_count" in content for content in contents):
            raise UsageError("logical_count: has the counts of all ranks; give one file of stat")
        return _recorded(contents, n_experts)


def read_counts(content: Mapping[str, Any], path: Path) -> Trace:
    """Read ``logical_count`` of a ``.json``: counts [L, E], or of every step [S, L, E].

    Raises:
        UsageError: If they are no whole numbers of one shape.
    """
    with reading(path, "unexpected layout", "give logical_count as [layers, experts]"):
        return counted(np.array(content["logical_count"]), "sglang logical_count")


def read_csv(paths: Sequence[Path], n_experts: int | None, top_k: int | None) -> Trace:
    """Read counts of one or more ranks, ``layer_id,expert_id,count``.

    Files of different ranks are added up. If a rank has several, the first of every rank are the
    first step, and so on, in the order of the times in their names.

    Raises:
        UsageError: If a file has other columns or numbers, or a rank fewer files than another.
    """
    fix = "give the files that SGLang's /dump_expert_distribution_record wrote"
    by_rank: dict[str, list[tuple[float, Path]]] = {}
    for path in paths:
        name = _NAME.search(path.name)
        if name is None and len(paths) > 1:
            raise UsageError(f"{path}: its name has no rank and time, as {_NAME.pattern}; {fix}")
        rank, time = ("", 0.0) if name is None else (name[1], float(name[2]))
        by_rank.setdefault(rank, []).append((time, path))
    if len({len(files) for files in by_rank.values()}) > 1:
        numbers = ", ".join(f"{len(files)} of rank {rank}" for rank, files in by_rank.items())
        raise UsageError(f"{paths[0].parent}: {numbers} files; give as many of every rank")
    frames = []
    for files in by_rank.values():
        for step, (_, path) in enumerate(sorted(files)):
            with reading(path, "not a table of counts", fix):
                frame = pd.read_csv(path)
                if list(frame) != ["layer_id", "expert_id", "count"]:
                    raise UsageError(f"has columns {', '.join(map(str, frame))}; {fix}")
                for column in frame:
                    if frame[column].dtype.kind not in "ui" or (frame[column] < 0).any():
                        raise UsageError(f"{column}: must be whole numbers of at least 0; {fix}")
                check_pairs("count", frame["count"].to_numpy())
                highest = int(frame["expert_id"].max()) + 1
                check("experts", highest, ExpertCount)
                if n_experts is not None and highest > n_experts:
                    raise UsageError(f"experts={n_experts}: has expert {highest - 1}; give more")
                frames.append(frame.assign(step=step))
    rows = pd.concat(frames)
    experts = range(n_experts or rows["expert_id"].max() + 1)
    layers = sorted(rows["layer_id"].unique())
    axes = [range(len(frames) // len(by_rank)), layers, experts]
    sums = rows.groupby(["step", "layer_id", "expert_id"])["count"].sum()
    count_SLE = sums.reindex(pd.MultiIndex.from_product(axes), fill_value=0).to_numpy()
    source = f"sglang csv, {len(by_rank)} ranks" if len(by_rank) > 1 else "sglang csv"
    if n_experts is None:  # the files leave out what has no token
        source += f"; assumed {len(experts)} experts, up to the highest number (--experts)"
    return counted(count_SLE.reshape(*map(len, axes)), source, top_k, layers)


def counted(
    count_SLE: Array, source: str, top_k: int | None = None, numbers: Sequence[int] = ()
) -> Trace:
    """Return counts [S, L, E] or [L, E] as a trace, without steps and layers that have none.

    ``numbers`` are those of the layers in their model, by default their places.
    """
    if count_SLE.ndim not in (2, 3):
        raise UsageError(
            f"logical_count: {list(count_SLE.shape)}; must be [steps, layers, experts], or summed "
            "over steps"
        )
    count_SLE = count_SLE.reshape(-1, *count_SLE.shape[-2:])  # a sum over steps has none
    steps, layers = (np.flatnonzero(count_SLE.any(axis=axes)) for axes in ((1, 2), (0, 2)))
    if not len(steps):
        raise UsageError("logical_count: all are 0; no token was recorded")
    names = numbers or range(count_SLE.shape[1])
    return Trace(
        n_experts=count_SLE.shape[2],
        load_SLE=count_SLE[np.ix_(steps, layers)],
        layers=tuple(str(names[layer]) for layer in layers.tolist()),
        top_k=top_k,
        source=source + left_out(n for place, n in enumerate(names) if place not in layers),
    )


def _recorded(contents: Sequence[Mapping[str, Any]], n_experts: int | None) -> Trace:
    records = [record for content in contents for record in content["records"]]
    records.sort(key=lambda record: (int(record["forward_pass_id"]), str(record.get("rank"))))
    _, step_R = np.unique([int(r["forward_pass_id"]) for r in records], return_inverse=True)
    of_file = [str(content["records"][0].get("rank", "unknown")) for content in contents]
    if len(set(of_file)) < len(of_file):
        raise UsageError(f"rank={max(of_file, key=of_file.count)}: of several files; give one each")
    ranks = f"rank{'s'[: len(of_file) > 1]} {', '.join(sorted(of_file))}"
    maps = [_map(content.get(_MAP)) for content in contents]
    logical_LP = maps[0]
    if any(not np.array_equal(logical_LP, other) for other in maps[1:]):  # type: ignore[arg-type]
        raise UsageError(f"{_MAP}: differs between the files; give those of one dump")
    if logical_LP is not None:
        n_experts = int(logical_LP.max()) + 1
    if "topk_ids_of_layer" not in records[0]:
        if logical_LP is None or n_experts is None:
            raise UsageError(f"{_MAP}: is missing; the counts are of copies")
        count_RLP = np.stack([array(_COUNT, record[_COUNT]) for record in records])
        check_pairs(_COUNT, count_RLP)
        count_SLE = np.zeros((step_R[-1] + 1, count_RLP.shape[1], n_experts), dtype=np.int64)
        for layer, logical_P in enumerate(logical_LP):
            np.add.at(count_SLE[:, layer], np.ix_(step_R, logical_P), count_RLP[:, layer])
        return counted(count_SLE, f"sglang per_pass, {ranks}")
    if n_experts is None:
        raise UsageError(f"n_experts: the recording has no {_MAP}; add --experts E")
    ids_LTK = [array(_IDS, record[_IDS]) for record in records]
    record_T = np.repeat(np.arange(len(records)), [ids.shape[1] for ids in ids_LTK])
    ids, token_T, layers, remark = without_padding(
        np.concatenate(ids_LTK, axis=1).transpose(1, 0, 2)
    )
    record_T = record_T[token_T]
    if logical_LP is not None:
        if (highest := int(ids.max())) >= logical_LP.shape[1]:
            raise UsageError(
                f"{_IDS}={highest}: the map has {logical_LP.shape[1]} physical experts; record "
                "with --disable-shared-experts-fusion"
            )
        ids = logical_LP[layers][np.arange(len(layers))[:, None], ids]
    modes = [records[number].get("forward_mode") for number in np.unique(record_T)]
    decode_S, mixed = _kinds(modes, step_R[np.unique(record_T)])
    return Trace(
        n_experts=n_experts,
        expert_TLK=unsigned(ids),
        step_T=step_R[record_T],
        decode_S=decode_S,
        layers=tuple(map(str, layers)),
        source=f"sglang per_token, {ranks}{mixed}{remark}",
    )


def _map(tensor: Any) -> Array | None:
    """Return the logical expert of every physical one [L, P]; None where the file does not say."""
    if tensor is None:
        return None
    logical_LP = array(_MAP, tensor)
    is_map = logical_LP.ndim == 2 and logical_LP.size and logical_LP.dtype.kind in "ui"
    if not is_map or logical_LP.min() < 0 or logical_LP.max() >= logical_LP.shape[1]:
        raise UsageError(
            f"{_MAP}: {logical_LP.dtype} {list(logical_LP.shape)}; must be integers [layers, "
            "physical experts], each at least 0 and below the number of physical experts"
        )
    return logical_LP


def _kinds(modes: Sequence[object], step_R: Array) -> tuple[Array | None, str]:
    """Return which steps are of decoding, and which modes do not say so, to follow the source.

    ``forward_mode`` is 1 for prompts (EXTEND) and 2 for decoding (DECODE). Others, such as 3
    (MIXED, a part of a prompt with running requests) or 5 (verified drafts), are neither, and the
    numbers above 5 differ between versions; 2.0 and true are no modes. Neither is a step that has
    both, of several ranks. ``step_R`` is the step of each mode, of the ranks that had a token.
    """
    others = sorted({shown(of) for of in modes if type(of) is not int or of not in (1, 2)})
    if others == ["null"]:  # an old version
        return None, ""
    if not others:
        is_decode_R = np.array([mode == 2 for mode in modes])
        _, first_S, counts_S = np.unique(step_R, return_index=True, return_counts=True)
        if (is_decode_R == np.repeat(is_decode_R[first_S], counts_S)).all():
            return is_decode_R[first_S], ""
        others = ["1 and 2 in one step"]
    return None, f"; forward_mode {', '.join(others)} is neither of prompts nor of decoding"


def load_tensors(path: Path) -> Any:
    """Return the tensors, numbers, texts, lists and dictionaries of a file of ``torch.save``.

    Raises:
        UsageError: If it holds anything else, or is no such file.
    """
    try:
        with path.open("rb") as file:
            start = file.read(2)
        if not start.startswith((b"PK", b"\x80")):  # an archive, or a pickle
            raise ValueError("it begins with other bytes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of versions of pickles
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path}: not read, because it holds more than tensors and plain values, and a pickle "
            "can run any program (torch.load refuses it with weights_only=True); save tensors, "
            "numbers and lists alone"
        ) from error
    except Exception as error:  # a damaged pickle raises what its instructions meet
        reason = first_line(error).partition(". ")[0]
        raise UsageError(
            f"{path}: no whole file of torch.save ({reason}); write it or copy it again"
        ) from error


def array(field: str, tensor: Any) -> Array:
    """Return a tensor that a file holds as an array; bfloat16, which numpy lacks, as float32.

    Raises:
        UsageError: If it is no dense tensor, or repeats its numbers (``expand``): a small file
            could then stand for any size.
    """
    is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    if not is_dense or tensor.is_quantized or tensor.is_meta:
        raise UsageError(f"{field}: is no dense tensor of plain numbers; save one by torch.save")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UsageError(f"{field}: repeats its numbers (expand); save tensor.contiguous()")
    tensor = tensor.detach()
    numbers: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return numbers


# Rows of expert ids that a server did not record.


def without_padding(ids: Array) -> tuple[Array, Array, Array, str]:
    """Return expert ids without layers, tokens and places that a server did not record.

    Behind the ids are the numbers of the tokens and of the layers that are left, and in words what
    is not, to follow the source of a trace.

    Servers begin with a buffer of 0 (vLLM, and SGLang's responses) or of −1, and write what a
    router chose. So a layer without an id above 0 has no experts, and a token that is 0 or −1
    throughout was not recorded. Places beyond the model's top-k (SGLang's recorder) are −1.

    Raises:
        UsageError: If nothing is left, or a token lacks some of its experts.
    """
    n_layers = ids.shape[1]
    highest_L = ids.max(axis=0).max(axis=1) if ids.size else np.zeros(n_layers)
    layer = np.flatnonzero(highest_L > 0)
    if not len(layer):
        raise UsageError(
            "expert ids: all are 0 or -1, so that the server recorded no expert; its MoE kernel "
            "may not record them: serve with another MoE backend, or a newer version"
        )
    left = ids if len(layer) == n_layers else ids[:, layer]
    if (lowest := int(ids.min())) < -1:
        raise UsageError(f"expert ids: {lowest} is none; must be at least 0, or -1 for no expert")
    token = np.arange(len(ids))
    if lowest < 0:
        filled = left >= 0
        token, place = (np.flatnonzero(filled.any(axis=axes)) for axes in ((1, 2), (0, 1)))
        left = left[np.ix_(token, np.arange(len(layer)), place)]
    if (is_blank_T := _is_blank(left)).any():
        token, left = token[~is_blank_T], left[~is_blank_T]
    if lowest < 0 and (left < 0).any():
        row, column, _ = np.argwhere(left < 0)[0]
        raise UsageError(
            f"expert ids: token {token[row]} lacks experts (-1) in layer {layer[column]} alone; "
            "only a whole token, layer or place may be -1"
        )
    blank = len(ids) - len(token)
    remark = f"; without {blank:,} token{'s'[: blank > 1]} that recorded no expert" if blank else ""
    return left, token, layer, left_out(np.setdiff1d(np.arange(n_layers), layer)) + remark


def _is_blank(ids: Array) -> Array:
    """Return which tokens are 0 throughout because a server did not record them [T].

    With a top-k of 2 or more all are, since a router chooses an expert once. With 1 it may have
    chosen expert 0 in every layer; an even router does so for one token in E^L. To a router expert
    0 is like any other. So these tokens are blank if there are at least four layers, and if no
    other expert has half as many tokens to itself in every layer.
    """
    is_zero_T: Array = np.logical_not(ids.any(axis=(1, 2)))
    if ids.shape[2] > 1 or not is_zero_T.any():
        return is_zero_T
    constant = ids[(ids == ids[:, :1]).all(axis=(1, 2)), 0, 0]
    tokens_E = np.bincount(constant)
    is_chance = ids.shape[1] < 4 or tokens_E[0] <= 2 * tokens_E[1:].max(initial=0)
    return np.zeros_like(is_zero_T) if is_chance else is_zero_T


def left_out(layers: Iterable[int]) -> str:
    """Return in words which of the model's layers have no experts; empty where all have some."""
    if not (numbers := [str(layer) for layer in layers]):
        return ""
    return (
        f"; without layer{'s'[: len(numbers) > 1]} {', '.join(numbers)}, which recorded no expert"
    )
