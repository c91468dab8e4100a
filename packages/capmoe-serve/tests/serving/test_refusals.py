"""Whatever cannot be is refused in one line, with status 2; nothing is written."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from capmoe_eval.__main__ import main
from tests.bad_input import WRITE
from tests.test_bad_input import snapshot

from serving.bad_traces import write_traces

REFUSED = {
    "advise": {
        "": "required",
        "example": "budget: nothing is asked",
        "example --at-most-points 1": "ranks: is not known",
        "example --at-most-points 1 --ranks 1": "ranks=1: one rank waits for no other",
        "example --at-most-points 1 --ranks 5": "ranks=5: 64 experts",
        "example --at-most-points 1 --ranks 8 --experts-per-rank 7": "give at least 8",
        "example --at-most-points 1 --ranks 8 --link-share 2": "--link-share=2",
        "example --at-most-points 1 --ranks 8 --expert-bytes 0": "--expert-bytes=0",
        "example --at-most-points 1 --ranks 8 --gammas inf": "gammas=inf",
        "example --at-most-points 1 --ranks 8 --gammas 0": "gammas=0",
        "example --at-most-points 1 --ranks 8 --step-tokens 0": "--step-tokens=0",
        "example --at-most-points 1 --ranks 8 --results nowhere": "no whole record of model",
        "example --at-most-points 1 --ranks 8 --out file": WRITE,
        "example --at-most-points 1 --ranks 8 --only decode": "the trace has no such step",
        "traces/recorded --at-most-points 1 --ranks 8": "give one of them, such as",
        "nowhere.npz --at-most-points 1": "no such file",
        "record.json --at-most-points 1": "not the name of a trace",
        **{
            f"example --ranks 8 --at-most-points 1 --{option} {word}": f"--{option}={word}: must be"
            for option, words in {
                "ranks": ("1e3", "4097", "1_6"),
                "experts": ("10000000000", f"1{'0' * 22}"),
                "top-k": ("0", "4097"),
                "experts-per-rank": ("0", "10000000000"),
                "step-tokens": (f"1{'0' * 13}", "٣"),
                "expert-bytes": ("0", f"1{'0' * 22}"),
                "at-most-points": ("101", "-1", "nan"),
            }.items()
            for word in words
        },
        "example --ranks 8 --at-most-points 1 --experts-per-rank 65": "needs one of each at most",
        "traces/fifo.npz --at-most-points 1": "no regular file",
        "columns --at-most-points 1": "manifest.json",
        "pipes/zoo_olmoe --at-most-points 1 --ranks 8": "no whole record of model",
        "pipes/zoo_olmoe --at-most-points 1 --ranks 8 --gammas 1": "--gammas: is of a trace",
        "example --nope": "--nope",
    },
    "loads": {
        "": "required",
        "record.json": "out: is required for a record",
        "nowhere.json out.png": "not a whole record",
        "file out.png": "not the name of a trace",
        "nowhere.npz": "no such file",
        ". out.png": "manifest.json",
        "traces/cut.npz": "not a whole trace of this suite",
        "traces/other.npz": "about is not in the archive; for counts or ids in arrays of your own",
        **{
            f"traces/{name}": "no regular file; save the input in one"
            for name in ("fifo.npz", "fifo.jsonl", "fifo.parquet", "fifo.pt", "zero.npz")
        },
        "traces/recorded/fifo.json out.png": "no regular file",
        "traces/encrypted.npz": "about.npy: is encrypted",
        "traces/packed.npz": "is packed in another way",
        "traces/flipped.npz": "Bad CRC-32",
        "traces/squeezed.npz": "cannot be unpacked",
        "traces/flipped.parquet": "CRC checksum",
        "traces/vast.npz": "load_SLE.npy: int64 [1000000000000, 1, 4] are 32,000,000,000,000 bytes",
        "traces/braces.npz": "load_SLE.npy: cannot be unpacked (",
        "traces/wide.npz": "n_experts=10000000000: must be a whole number from 1 to 4096",
        "traces/nameless.npz": "source=null: must be text",
        "traces/escape.npz": "model=\\x1b[31m: must be text in one line",
        "traces/named.npz": "layers=abcd: must be a list of names",
        "traces/high.npz": "load_SLE: 4.61e+18 pairs in all; counts may sum to",
        "traces/loud.npz": "score_TLK=1e+308: a gate score",
        "traces/relabelled.parquet": "layer: must be 0 to 0 in turn",
        "traces/expanded.pt": "logical_count: repeats its numbers (expand)",
        "traces/gradient.pt": "load_SLE: float32",
        "traces/memo.pt": "no whole file of torch.save",
        "traces/nested.jsonl --experts 8": "line 1: nested too deeply",
        "traces/header.jsonl --experts 8": "line 1: routed_experts: ",
        "traces/negative.jsonl --experts 8": "expert ids: -2 is none",
        "traces/later.npz": "field: the file is of another version of this suite",
        "traces/cut.parquet": "not a whole trace of this suite",
        "traces/other.parquet": "layers is missing",
        "traces/cut.pt": "no whole file of torch.save",
        "traces/text.pt": "it begins with other bytes",
        "traces/other.pt": "has neither logical_count nor records",
        "traces/flat.pt": "logical_count: [8]; must be [steps, layers, experts]",
        "traces/empty.jsonl --experts 8": "is empty; give a JSON response",
        "traces/empty.jsonl": "add --experts E",
        "traces/cut.jsonl --experts 8": "line 1: not a whole JSON object",
        "traces/chat.jsonl --experts 8": "--enable-return-routed-experts",
        "traces/words.jsonl --experts 8": "line 1: no response of vLLM or SGLang, which has",
        "traces/ragged.jsonl --experts 8": "tokens differ in their layers or in their top-k",
        "traces/number.jsonl --experts 8": "int64 []; must be integers",
        "traces/recorded": "a directory with 2 files of a server; give one of them, such as",
        "traces/recorded/0.pt traces/recorded/1.pt": "give one trace at a time",
        "traces/recorded/0.pt --experts 16": "experts=16: traces/recorded/0.pt has 8",
        "traces/recorded/0.pt --only decode": "does not say which steps are prompts",
        "traces/recorded/0.pt --only promts": "--only",
        "traces/recorded/0.pt --step-tokens 32": "step tokens: the trace has counts of steps",
        "traces/workload": "no trace of Megatron-LM (tensors is missing)",
        "trace.npz out.bmp": "bmp",
        "trace.npz --json file/out.json": WRITE,
        "trace.npz --gammas -1": "--gammas",
        "trace.npz --top-k 1.0": "--top-k=1.0",
        "trace.npz --step-tokens 0": "--step-tokens=0",
        "traces/vllm.jsonl --experts 8 --top-k 3": "top_k=3: traces/vllm.jsonl has 2",
        "traces/vllm.csv": "arrays of your own see docs/how-to/record_traffic.md",
        "record.json out.png": "no record of this suite",
        "record.json file/out.png": WRITE,
        "record.json out.png --layer abc": "--layer=abc",
        "record.json out.png --layer -1": "--layer=-1",
    },
}
ROWS = [(command, *row) for command, rows in REFUSED.items() for row in rows.items()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the rows name."""
    place = tmp_path_factory.mktemp("place")
    (place / "file").write_text("")
    (place / "record.json").write_text("{}")
    (place / "columns").mkdir()
    write_traces(place / "traces")
    (place / "pipes/zoo_olmoe/obqa").mkdir(parents=True)
    for name in ("inputs.json", "zoo_olmoe/obqa/score.json"):
        os.mkfifo(place / "pipes" / name)
    return place


@pytest.mark.parametrize(
    ("command", "words", "said"), ROWS, ids=[f"{row[0]} {row[1]}"[:80] for row in ROWS]
)
def test_bad_input_is_one_line_and_status_2(
    command: str,
    words: str,
    said: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    before = snapshot(place)
    with pytest.raises(SystemExit) as done:
        sys.exit(main([command, *shlex.split(words)]))
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (done.value.code, out) == (2, "")
    assert line.startswith("error: ")
    assert said in line
    assert len(line) < 2_000
    assert snapshot(place) == before
