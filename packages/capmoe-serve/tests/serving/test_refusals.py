"""Whatever cannot be is refused in one line, with status 2; nothing is written."""

from __future__ import annotations

import json
import os
import shlex
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from capmoe_eval.__main__ import main
from tests.bad_input import WRITE, refusal

from capmoe_serve.trace import SCHEMA

ADVISE = "example --ranks 8 --at-most-points 1"
REFUSED = {
    "advise": {
        "": "required",
        "example --ranks 8": "budget: nothing is asked",
        "example --at-most-points 1": "ranks: is not known",
        "example --at-most-points 1 --ranks 1": "ranks=1: one rank waits for no other",
        f"{ADVISE} --experts-per-rank 7": "give at least 8",
        f"{ADVISE} --experts-per-rank 65": "needs one of each at most",
        f"{ADVISE} --nodes 2": "nodes=2: must divide the groups of experts, here 1; give n_group",
        f"{ADVISE} --nodes 3 --groups 3": "groups=3: must divide the number of experts, 64",
        f"{ADVISE} --results nowhere": "no whole record of model zoo_olmoe; it has none; give a "
        "directory with a folder for each model",
        f"{ADVISE} --results zoo/zoo_olmoe": "it has none; give a directory with a folder for each",
        f"{ADVISE} --results zoo --model zoo_*": "no whole record of model zoo_*; it has zoo_deep",
        f"{ADVISE} --results zoo --model zoo_mixtral": "with 4 MoE layers of 8 experts, top-2; the "
        "trace has 4 MoE layers of 64 experts, top-8; give records of the model that was served",
        "traces/0.pt --ranks 2 --at-most-points 1 --results zoo": "model: the trace names none",
        f"{ADVISE} --out file": WRITE,
        f"{ADVISE} --only decode": "the trace has no such step",
        **{
            f"{ADVISE} --{option} {word}": f"--{option}={word}: must be"
            for option, words in {
                "ranks": ("1e3", "4097", "1_6"),
                "experts": (f"1{'0' * 22}",),
                "top-k": ("0",),
                "experts-per-rank": ("0",),
                "step-tokens": ("0", "٣"),
                "at-most-points": ("101", "-1", "nan"),
                "gammas": ("inf", "0", "adaptive"),
            }.items()
            for word in words
        },
        "records --at-most-points 1 --ranks 8": "is a directory without recordings",
    },
    "loads": {
        "": "required",
        "file": "not the name of a trace",
        "traces/0.pt traces/flat.pt": "source=traces/flat.pt: one trace is taken; give its file",
        "traces/0.pt --ranks 8 traces/flat.pt": "source=traces/flat.pt: one trace is taken",
        "record.json": "not the name of a trace",
        "vllm.csv": "no such file",
        "records": "recordings of SGLang (.pt, .csv); give the file of a trace",
        **{
            f"traces/{name}": "no regular file; save the input in one"
            for name in ("fifo.npz", "fifo.jsonl", "fifo.pt", "zero.npz")
        },
        "traces/cut.npz": "not a whole trace of this suite",
        "traces/other.npz": "about is not in the archive; for counts or ids in arrays of your own",
        "traces/later.npz": "field: the file is of another version of this suite",
        "traces/flipped.npz": "Bad CRC-32",
        "traces/pickled.npz": "Object arrays cannot be loaded",
        "traces/named.npz": "layers=abcd: must be a list of names",
        "traces/expanded.pt": "logical_count: repeats its numbers (expand)",
        "traces/gradient.pt": "load_SLE: float32",
        "traces/program.pt": "weights_only=True",  # and is not run
        "traces/nothing.pt": "has neither logical_count nor records",
        "traces/zeros.pt": "logical_count: all are 0",
        "traces/list.pt": "logical_count: is no dense tensor",
        "traces/fields.pt": "unexpected layout",
        "traces/memo.pt": "no whole file of torch.save",
        "traces/cut.pt": "no whole file of torch.save",
        "traces/text.pt": "it begins with other bytes",
        "traces/flat.pt": "logical_count: [8]; must be [steps, layers, experts]",
        "traces/empty.jsonl --experts 8": "is empty; give a JSON response",
        "traces/nested.jsonl --experts 8": "line 1: nested too deeply",
        "traces/header.jsonl --experts 8": "line 1: routed_experts: ",
        "traces/cut.jsonl --experts 8": "line 1: not a whole JSON object",
        "traces/vllm.jsonl --experts 8 --top-k 3": "top_k=3: traces/vllm.jsonl has 2",
        "traces/0.pt --experts 16": "experts=16: traces/0.pt has 8",
        "traces/0.pt --only decode": "does not say which steps are prompts",
        "traces/0.pt --step-tokens 32": "step tokens: the trace has counts of steps",
        "example --json file/out.json": WRITE,
    },
    "run": {
        "save_trace=file": f"save_trace=file: {WRITE}",
        "save_trace=true": "save_trace=true: must be text",
        **{f"trace_tokens={word}": "trace_tokens=" for word in ("0", "1.5", "null", "9" * 23)},
    },
}
ROWS = [(command, *row) for command, rows in REFUSED.items() for row in rows.items()]
HEADER = b64encode(b"\x93NUMPY\x01\x00\x85\x03" + b"(" * 900 + b"\n").decode()


def responses(routed: str) -> str:
    return f'{{"choices": [{{"routed_experts": {routed}}}]}}'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the rows name: traces that are cut off, damaged or crafted."""
    place = tmp_path_factory.mktemp("place")
    (place / "file").write_text("")
    (place / "record.json").write_text("{}")
    (place / "zoo").symlink_to(Path(__file__).parents[4] / "results/zoo")
    traces = place / "traces"
    traces.mkdir()
    (place / "records").mkdir()
    for name in ("fifo.npz", "fifo.jsonl", "fifo.pt"):
        os.mkfifo(traces / name)
    (traces / "zero.npz").symlink_to("/dev/zero")
    np.savez(traces / "other.npz", a=np.arange(3))
    counts, objects = np.ones((2, 1, 4), dtype=np.int64), np.array([object()], dtype=object)
    crafted: dict[str, tuple[dict[str, Any], Any]] = {
        "later": ({"field": 1}, counts),
        "named": ({"layers": "abcd"}, counts),
        "pickled": ({}, objects),
    }
    for name, (fields, load_SLE) in crafted.items():
        about = {"schema": SCHEMA, "n_experts": 4, "layers": ["0"], "source": "made", **fields}
        np.savez(traces / f"{name}.npz", about=np.array(json.dumps(about)), load_SLE=load_SLE)
    data = bytearray((traces / "named.npz").read_bytes())
    data[data.index(b"NUMPY", data.index(b"load_SLE.npy")) + 140] ^= 255  # of a count
    (traces / "flipped.npz").write_bytes(data)
    for name, count in {
        "0": torch.ones(2, 3, 8, dtype=torch.int64),
        "flat": torch.ones(8),
        "program": Path("x"),
        "zeros": torch.zeros(2, 2, 4),
        "list": [1],
        "expanded": torch.ones(1, 1, 1, dtype=torch.int64).expand(9**5, 9**5, 4),
        "gradient": torch.ones(2, 1, 4, requires_grad=True),
    }.items():
        torch.save({"logical_count": count}, traces / f"{name}.pt")
    torch.save({"records": []}, traces / "nothing.pt")
    fields = {"last_physical_to_logical_map": torch.zeros(1, 1, dtype=torch.int64)}
    torch.save(fields | {"records": [{"forward_pass_id": 1}]}, traces / "fields.pt")
    torch.save({"weight": torch.ones(8)}, traces / "other.pt")
    (traces / "memo.pt").write_bytes(b"\x80\x02h\x05.")  # asks for what it never put
    (traces / "text.pt").write_text("a")
    for kind in ("npz", "pt"):
        path = traces / f"other.{kind}"
        (traces / f"cut.{kind}").write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for name, text in {
        "empty": "",
        "cut": responses("[[[0, 1")[:-3],
        "header": responses(json.dumps(HEADER)),
        "vllm": responses("[[[0, 1]], [[2, 3]]]"),
        "nested": "[" * 10**5,
    }.items():
        (traces / f"{name}.jsonl").write_text(text)
    return place


@pytest.mark.parametrize(
    ("command", "words", "part"), ROWS, ids=[f"{row[0]} {row[1]}"[:80] for row in ROWS]
)
def test_bad_input_is_one_line_and_status_2(
    command: str,
    words: str,
    part: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    assert part in refusal(main, [command, *shlex.split(words)], place, capsys)
