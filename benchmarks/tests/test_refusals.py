"""What cannot be is refused in one line, before anything is measured."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from capmoe_bench.benchmarks import main
from tests.bad_input import refusal

REFUSED = {
    **{
        f"forward --{option} {word}": f"--{option}={word}: must be"
        for option in ("layers", "batch", "prompt", "rounds")
        for word in ("0", "-1", "x")
    },
    **{f"forward --peak {word}": "peak=" for word in ("nan", "inf", "-1", "0", "100", "x")},
    "forward --warmup -1": "--warmup=-1",
    "forward --layers 5000": "--layers=5000: must be a whole number from 1 to 4096",
    "forward --batch 7": "batch=7: must be a multiple",
    "forward --shape olmo": "did you mean 'olmoe'",
    "forward --device qpu": "device=qpu",
    "suite --limit 0": "--limit=0",
    "suite --model nope": "--model=nope",
    "suite --tasks obqq": "did you mean 'obqa'",
    "generate --shapes zoo:olmo": "did you mean 'olmoe'",
    "generate --shapes zoo_olmoe": "shapes=zoo_olmoe: ",
    "generate --shapes real:nobody": "`make real` writes it",
    "generate --batch 3": "batch=3: must be a multiple of 8",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_and_status_2(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert REFUSED[words] in refusal(main, shlex.split(words), tmp_path, capsys)
