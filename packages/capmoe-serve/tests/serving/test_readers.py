"""What servers write is read as what they routed.

Each file is written here from the layout that its reader cites.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from capmoe_eval.errors import UsageError

from capmoe_serve.readers.formats import read_trace
from capmoe_serve.trace import Trace

# [T=5, L=2, K=2] of 6 experts: two tokens of a prompt, and the answer's.
IDS = np.array(
    [[[0, 3], [1, 2]], [[5, 1], [2, 0]], [[1, 0], [3, 4]], [[2, 1], [0, 1]], [[4, 5]] * 2]
)


def npy(ids: Any) -> str:
    """Return the base64 of ids as an ``.npy`` file, as vLLM encodes them."""
    buffer = io.BytesIO()
    np.save(buffer, ids)
    return base64.b64encode(buffer.getvalue()).decode()


def lines(path: Path, *responses: Any) -> Path:
    path.write_text("".join(json.dumps(response) + "\n" for response in responses))
    return path


def completion(routed: Any, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": "a", "finish_reason": "length", "routed_experts": routed}
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice]} | fields


def test_vllm_lists_with_the_prompt_beside_the_choices(tmp_path: Path) -> None:
    aborted = completion(None, prompt_routed_experts=None)
    two = completion(IDS[2:3].tolist(), prompt_routed_experts=IDS[:2].tolist())
    two["choices"].append({"index": 1, "text": "b", "routed_experts": IDS[3:].tolist()})
    cached = np.concatenate([np.full_like(IDS[:1], -1), IDS[1:2]])
    again = completion(IDS[2:3].tolist(), prompt_routed_experts=cached.tolist())
    trace = read_trace(lines(tmp_path / "out.jsonl", aborted, two, again), 6)
    np.testing.assert_array_equal(trace.expert_TLK, np.concatenate([IDS, IDS[1:3]]))
    assert (trace.model, trace.top_k, trace.step_T, trace.score_TLK) == ("m", 2, None, None)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
@pytest.mark.parametrize("form", ["lines", "batch.jsonl", "batch.json"])
def test_vllm_base64_of_prompt_and_answer(dtype: str, form: str, tmp_path: Path) -> None:
    responses = [completion(npy(part.astype(dtype))) for part in (IDS, IDS[:2])]
    path = tmp_path / "out.jsonl"
    if form == "lines":
        lines(path, *responses)
    else:  # a list of what `vllm run-batch` wraps
        path = path.with_name(form)
        lines(path, [{"custom_id": "a", "response": {"body": body}} for body in responses])
    trace = read_trace(path, 6)
    np.testing.assert_array_equal(trace.expert_TLK, np.concatenate([IDS, IDS[:2]]))
    assert trace.expert_TLK.dtype == np.uint8


def generated(ids: Any, **fields: Any) -> dict[str, Any]:
    """Return SGLang's answer to /generate: a prompt of two tokens, and the others but one."""
    routed = base64.b64encode(np.ascontiguousarray(ids, "<i4").tobytes()).decode()
    counted = {"prompt_tokens": 2, "completion_tokens": len(ids) - 1}
    return {"text": "a", "meta_info": counted | {"routed_experts": routed} | fields}


BESIDE = completion(None, sglext={"routed_experts": "AAAA"})
"""Experts beside the choices, as SGLang sends them."""


@pytest.mark.parametrize(
    ("response", "part"),
    [
        (completion(None), "no response has routed_experts; .*--enable-return-routed-experts"),
        (completion(npy(IDS.astype("f4"))), r"line 1: routed_experts: float32 \[5, 2, 2\]"),
        (completion(npy(IDS[0])), r"line 1: routed_experts: int64 \[2, 2\]"),
        (completion("bm8="), "line 1: routed_experts: "),
        (completion(npy(np.array([None]))), "line 1: routed_experts: .*allow_pickle"),
        (completion(npy(IDS + 1)), "expert_TLK=6: experts are numbered from 0 to 5; .*--experts"),
        (completion([[[0, -1]], [[1, 2]]]), "token 0 lacks experts"),
        (completion(npy(IDS * 0)), "all are 0 or -1, so that the server recorded no expert"),
        (completion(npy(IDS[:, :, :1].repeat(2, 2))), "expert 0 twice in layer 0.*leaves 0 where"),
        (completion([[[0, -2], [1, 2]]]), "expert ids: -2 is none"),
        (completion([[[0, 1], [1]]]), "tokens differ in their layers or in their top-k"),
        (completion(5), r"int64 \[\]; must be integers"),
        ({"error": "no"}, "line 1: no response of vLLM or SGLang"),
        (generated(IDS, routed_experts=None), "and send .return_routed_experts.: true with each"),
        (generated(IDS, completion_tokens=3), "20 ids are no multiple of 4 tokens"),
        (generated(IDS, completion_tokens=-1), "completion_tokens=-1: must be a whole"),
        (generated(IDS, prompt_tokens=1, completion_tokens=0), "of 0 tokens"),
        (generated(IDS, routed_experts="AAA"), "line 1: routed_experts: "),
        (generated(IDS, routed_experts_dtype="int8"), "routed_experts_dtype=int8: "),
        (generated(IDS, prompt_tokens=None), "line 1: routed_experts: "),
        (BESIDE, "usage is missing"),
        (BESIDE | {"choices": [*BESIDE["choices"]] * 2}, "2 choices, .*return_meta_info"),
    ],
)
def test_responses_are_refused_in_one_line(response: Any, part: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "out.jsonl", response)
    with pytest.raises(UsageError, match=part) as refused:
        read_trace(path, 6, 2)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="add --experts E"):
        read_trace(path)


def golden(name: str, **options: int | None) -> Trace:
    return read_trace(Path(__file__).parent / "responses" / f"{name}.jsonl", 6, **options)


TOP_1 = np.random.default_rng(0).integers(1, 16, (40, 4, 1)).astype("u1")
BLANK, CONSTANT = TOP_1.copy(), TOP_1.copy()
BLANK[:30] = CONSTANT[15:30] = 0
CONSTANT[:15] = 1  # as if a token had the same expert in every layer


@pytest.mark.parametrize(
    ("ids", "rows", "remark"),
    [
        # vLLM's buffer begins with zeros, which a dense layer, and a token without, keep.
        (np.pad(IDS, ((0, 0), (1, 0), (0, 0))), range(5), "without layer 0, which"),
        (np.pad(IDS, ((0, 1), (0, 0), (0, 0))), range(5), "without 1 token that"),
        # As of Llama 4: with K=1 a dense layer repeats no expert, and would be a straggler.
        (np.pad(TOP_1[:, 1:2], ((0, 0), (1, 1), (0, 0))), range(40), "without layers 0, 2, which"),
        # With K=1 a router may choose expert 0 in every layer, as it may any other expert.
        (BLANK, range(30, 40), "without 30 tokens that"),
        (CONSTANT, range(40), ""),
        (BLANK[15:, :3], range(25), ""),
    ],
)
def test_rows_of_zeros_recorded_no_expert(
    ids: Any, rows: range, remark: str, tmp_path: Path
) -> None:
    trace = read_trace(lines(tmp_path / "out.jsonl", completion(npy(ids))), 16)
    layers = [layer for layer in range(ids.shape[1]) if ids[:, layer].any()]
    np.testing.assert_array_equal(trace.expert_TLK, ids[rows][:, layers])
    assert trace.layers == tuple(map(str, layers))
    assert trace.source == (f"vllm; {remark} recorded no expert" if remark else "vllm")


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("sglang_generate", [IDS]),  # two requests, of which the later is in bytes
        # In the choice, beside the choices, and in meta_info of two choices.
        ("sglang_completions", [IDS, IDS, IDS[:3], IDS]),
    ],
)
def test_sglang_responses(name: str, tokens: list[Any]) -> None:
    trace = golden(name, top_k=2)
    np.testing.assert_array_equal(trace.expert_TLK, np.concatenate(tokens))
    assert (trace.layers, trace.top_k, trace.step_T) == (("1", "2"), 2, None)
    assert trace.source == "sglang; without layer 0, which recorded no expert"
    with pytest.raises(UsageError, match="add --top-k K"):
        golden(name)


def test_responses_that_are_not_whole_are_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = json.dumps(completion(npy(IDS)))
    path.write_text("\n".join([whole, '{"error": "no"}', whole, whole[:-9]]))
    trace = read_trace(path, 6)
    assert trace.n_tokens == 10
    assert trace.source == (
        "vllm; without 2 of 4 responses (line 2: no response of vLLM or SGLang, which has choices, "
        "or meta_info)"
    )


PROMPT = np.argsort(np.random.default_rng(1).random((40, 2, 6)), axis=2)[:, :, :2]
"""Two blocks of a prefix cache, and a half."""


def cached(server: str, ids: Any, tokens: int | None, prompt: int = 40) -> dict[str, Any]:
    """Return a server's response of which so many tokens were in the prefix cache."""
    counted = {"prompt_tokens": prompt, "completion_tokens": len(ids) - prompt + 1}
    if server == "sglang":
        return generated(ids, **counted, **({} if tokens is None else {"cached_tokens": tokens}))
    details = None if tokens is None else {"cached_tokens": tokens}
    usage = {**counted, "prompt_tokens_details": details}
    if server == "vllm":
        return completion(npy(ids), usage=usage)
    lists = {"prompt_routed_experts": ids[:prompt].tolist(), "usage": usage}
    return completion(ids[prompt:].tolist(), **lists)


@pytest.mark.parametrize("server", ["sglang", "vllm", "vllm lists"])
def test_cached_tokens_are_no_load(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server returns their experts again; some versions of vLLM leave out a 0."""
    answers = [np.concatenate([PROMPT, part]) for part in (IDS, IDS[::-1], IDS[1:])]
    sent = [cached(server, ids, n) for ids, n in zip(answers, (None, 32, 39), strict=True)]
    trace = read_trace(lines(tmp_path / "out.jsonl", *sent), 6, 2)
    computed = np.concatenate([answers[0], answers[1][32:], answers[2][39:]])
    np.testing.assert_array_equal(trace.expert_TLK, computed)
    assert trace.source == f"{server.split(maxsplit=1)[0]}; without 71 cached tokens of prompts"
    assert not capsys.readouterr().err
    sent[2] = cached(server, answers[2], 41)
    assert "line 3: routed_experts: cached_tokens=41: the prompt has 40 tokens" in (
        read_trace(lines(tmp_path / "out.jsonl", *sent), 6, 2).source
    )


@pytest.mark.parametrize("server", ["sglang", "vllm", "vllm lists"])
def test_a_prefix_that_may_have_been_cached_is_counted_with_a_warning(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, path = np.concatenate([PROMPT, IDS]), tmp_path / "out.jsonl"
    trace = read_trace(lines(path, *[cached(server, ids, None)] * 2), 6, 2)
    assert trace.n_tokens == 90
    assert "; with 32 tokens that may have been cached" in trace.source
    warning = f"warning: {path}: 32 of 90 tokens have the experts of an earlier"
    assert capsys.readouterr().err.startswith(warning)
    read_trace(lines(path, cached(server, ids, None), cached(server, ids[1:], None, 39)), 6, 2)
    assert not capsys.readouterr().err  # other tokens from the first on


@pytest.mark.parametrize("several", [False, True])
def test_what_is_left_out_of_a_prompt(several: bool, tmp_path: Path) -> None:
    """One of several choices computed the prompt; and some tokens may not have been returned."""
    answers = [np.concatenate([PROMPT, part]) for part in (IDS, IDS[::-1])]
    response = cached("vllm", answers[0], 32)
    path = tmp_path / "out.jsonl"
    if several:  # the number is that of the choice that ended last, which found the first's prompt
        response["choices"] = [{"index": n, "routed_experts": npy(answers[n])} for n in range(2)]
        trace = read_trace(lines(path, response, response), 6)
        computed = np.concatenate([answers[0], *(answers[n][32:] for n in (1, 0, 1))])
    else:  # as with vLLM's routed_experts_prompt_start
        response["choices"][0]["routed_experts"] = npy(answers[0][30:])
        trace, computed = read_trace(lines(path, response), 6), answers[0][32:]
    np.testing.assert_array_equal(trace.expert_TLK, computed)


def test_a_top_k_that_divides_the_models_is_refused(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    ids = np.argsort(generator.random((100, 2, 8)), axis=2)[:, :, :4]
    path = lines(tmp_path / "out.jsonl", generated(ids))
    assert read_trace(path, 8, 4).top_k == 4
    for part in (1, 2):
        with pytest.raises(UsageError, match=f"top_k={part}: no token has an expert in two"):
            read_trace(path, 8, part)


def recording(
    rank: int = 0, tokens: tuple[Any, Any] = (IDS[:2], IDS[2:]), **changes: Any
) -> dict[str, Any]:
    """Return what SGLang dumps in mode ``per_token``: 3 layers, the first dense; 8 places.

    Physical experts 6 and 7 are copies of 0 and 1.
    """
    physical = torch.arange(8).repeat(3, 1)
    physical[:, 6:] -= 6
    records = []
    for number, of_pass in zip((7, 9), tokens, strict=True):
        ids = torch.full((3, len(of_pass), 8), -1, dtype=torch.int32)
        ids[1:, :, :2] = torch.from_numpy(of_pass.transpose(1, 0, 2))
        ids[2][ids[2] == 1] = 7
        counts = [torch.bincount(layer[layer >= 0], minlength=8) for layer in ids]
        record = {"forward_pass_id": number, "rank": rank, "forward_mode": 1}
        record |= {"topk_ids_of_layer": ids, "global_physical_count": torch.stack(counts)}
        records.append(record | {"input_ids": [1] * len(of_pass), "extend_seq_lens": None})
    # The later pass stands first.
    return {"records": records[::-1], "last_physical_to_logical_map": physical} | changes


def saved(path: Path, content: Any) -> Path:
    """Return the path of what is saved there."""
    torch.save(content, path)
    return path


def as_counts(content: dict[str, Any]) -> dict[str, Any]:
    """Return what SGLang dumps in mode ``per_pass``."""
    for record in content["records"]:
        del record["topk_ids_of_layer"]
    return content


def test_sglang_counts_of_both_modes_are_those_of_its_tokens(tmp_path: Path) -> None:
    path, passes = tmp_path / "r.pt", as_counts(recording())
    tokens = read_trace(saved(path, recording()))
    np.testing.assert_array_equal(tokens.expert_TLK, IDS)
    assert tokens.step_T.tolist() == [0, 0, 1, 1, 1]
    logical = torch.zeros((4, 3, 6), dtype=torch.int32)  # a buffer with two steps that are unused
    logical[:2, 1:] = torch.from_numpy(tokens.loads().copy())
    stat = {"rank": 0, "logical_count": logical, "average_utilization_rate_over_window": None}
    for content in (passes, stat):
        trace = read_trace(saved(path, content))
        np.testing.assert_array_equal(trace.loads(), tokens.loads())
        assert (trace.expert_TLK, trace.n_tokens) == (None, None)
        assert trace.layers == tokens.layers == ("1", "2")
    for record in passes["records"]:  # of two copies 2**63 is negative
        record["global_physical_count"] = torch.full((3, 8), 2**62)
    for content, part in (
        (passes, "global_physical_count: .* pairs in all"),
        (passes | {"last_physical_to_logical_map": None}, "is missing; the counts are of copies"),
        (recording(last_physical_to_logical_map=torch.zeros(3, 2, dtype=int)), "=7: the map has 2"),
        (recording(last_physical_to_logical_map=None), "add --experts E"),
    ):
        with pytest.raises(UsageError, match=part):
            read_trace(saved(path, content))
    assert read_trace(path, 8).n_experts == 8


@pytest.mark.parametrize("mode", [1, 2, 3, "2", 2.0, True, [2], 99, None])
def test_sglang_says_which_steps_are_of_decoding(mode: object, tmp_path: Path) -> None:
    recorded = recording()
    recorded["records"][0]["forward_mode"] = mode  # pass 9 stands first
    if mode is None:  # an old version
        for record in recorded["records"]:
            del record["forward_mode"]
    trace = read_trace(saved(tmp_path / "r.pt", recorded))
    if type(mode) is int and mode < 3:
        assert trace.decode_S.tolist() == [False, mode == 2]
    else:
        assert trace.decode_S is None
        assert ("is neither of prompts nor of decoding" in trace.source) == (mode is not None)


def test_recordings_of_several_ranks_are_one_trace(tmp_path: Path) -> None:
    """What two ranks computed in one pass is one step; counts say the same."""
    first, second = tmp_path / "0.pt", tmp_path / "1.pt"
    ranks = (recording(), recording(1, (IDS[2:3], IDS[:1])))
    saved(first, ranks[0])
    saved(second, ranks[1])
    trace = read_trace(tmp_path)
    together = np.concatenate([IDS[:2], IDS[2:3], IDS[2:], IDS[:1]])
    np.testing.assert_array_equal(trace.expert_TLK, together)
    assert trace.step_T.tolist() == [0] * 3 + [1] * 4
    assert trace.source.startswith("sglang per_token, ranks 0, 1")
    ranks[1]["records"][0]["forward_mode"] = 2  # in pass 9, in which the other has prompts
    saved(second, ranks[1])
    assert "forward_mode 1 and 2 in one step is neither" in read_trace(tmp_path).source
    saved(first, as_counts(ranks[0]))
    saved(second, as_counts(ranks[1]))
    np.testing.assert_array_equal(read_trace(tmp_path).loads(), trace.loads())
    for content, part in (
        (recording(1, last_physical_to_logical_map=None), "last_physical_to_logical_map: differs"),
        (
            recording(1, last_physical_to_logical_map=torch.full((3, 8), 8)),
            "last_physical_to_logical_map: .* below the number of physical experts",
        ),
        (recording(), "rank=0: of several files"),
        ({"logical_count": torch.ones(2, 2, 4)}, "logical_count: has the counts of all ranks"),
    ):
        saved(second, content)
        with pytest.raises(UsageError, match=part):
            read_trace(tmp_path)


DUMPS = {  # layer, expert, count; ranks do not end at the same time
    "rank0_timestamp2.5": [(3, 0, 4), (3, 2, 2), (5, 1, 6)],
    "rank1_timestamp3.75": [(3, 0, 1), (3, 1, 5), (5, 1, 6)],
    "rank0_timestamp10.25": [(3, 1, 3), (5, 0, 3)],
    "rank1_timestamp11.5": [(3, 1, 3), (5, 2, 3)],
}


def test_sglang_csv_of_ranks_and_times(tmp_path: Path) -> None:
    for name, rows in DUMPS.items():
        text = "".join(f"{layer},{expert},{count}\n" for layer, expert, count in rows)
        path = tmp_path / f"expert_distribution_{name}.csv"
        path.write_text(f"layer_id,expert_id,count\n{text}")
    trace = read_trace(tmp_path, top_k=2)
    assert trace.loads().tolist() == [[[5, 5, 2], [0, 12, 0]], [[0, 6, 0], [3, 0, 3]]]
    assert (trace.layers, trace.n_experts, trace.n_tokens) == (("3", "5"), 3, 9)
    assert trace.source == (
        f"sglang csv, 2 ranks; assumed {trace.n_experts} experts, up to the highest number "
        "(--experts)"
    )
    assert read_trace(tmp_path, trace.n_experts + 4).source == "sglang csv, 2 ranks"
    alone = read_trace(path, 4)  # the last dump, of rank 1
    assert alone.loads().tolist() == [[[0, 3, 0, 0], [0, 0, 3, 0]]]
    with pytest.raises(UsageError, match=r"experts=2: has expert 2"):
        read_trace(path, 2)
    path = path.rename(tmp_path / "last.csv")
    with pytest.raises(UsageError, match="its name has no rank and time"):
        read_trace(tmp_path)
    path.unlink()
    with pytest.raises(UsageError, match="2 of rank 0, 1 of rank 1 files; give as many"):
        read_trace(tmp_path)
    for text, part in (
        ("a,b\n1,2\n", "has columns a, b"),
        ("layer_id,expert_id,count\n1,2,-3\n", "count: must be whole numbers of at least 0"),
        ("layer_id,expert_id,count\n1,2.5,3\n", "expert_id: must be whole numbers"),
        ("layer_id,expert_id,count\n", "must be whole numbers"),
        ("layer_id,expert_id,count\n1,5000,3\n", "experts=5001: must be a whole number"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=part) as refused:
            read_trace(path)
        assert "\n" not in str(refused.value)


def test_counts_in_json(tmp_path: Path) -> None:
    """As SGLang's --init-expert-location reads them, and ``advise`` writes them."""
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": [[0, 0, 0], [4, 1, 1]]}))
    trace = read_trace(path)
    assert trace.loads().tolist() == [[[4, 1, 1]]]
    assert trace.source == "sglang logical_count; without layer 0, which recorded no expert"
    path.write_text(json.dumps({"logical_count": [[0.5, 1], [4]]}))
    with pytest.raises(UsageError, match=r"counts\.json: unexpected layout"):
        read_trace(path)
