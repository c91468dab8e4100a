"""What cannot be is refused in one line, before anything is measured."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from capmoe_eval.__main__ import main
from tests.bad_input import WRITE, refusal

REFUSED = {
    "": "required",
    "nope": "nope",
    f"decision --rounds 1{'0' * 22}": "--rounds=1",
    "decision --tokens 0": "--tokens=0",
    "decision --ranks 0": "--ranks=0",
    "decision --ranks 7 --tokens 70": "7 ranks",
    "decision --tokens 10": "must be a multiple of ranks",
    "decision --layer-tokens 0": "--layer-tokens=0",
    "decision --shapes nope": "shapes=nope",
    "placement --models zoo_olmo": "did you mean 'zoo_olmoe'",
    "decision --out file": f"--out=file: {WRITE}",
    **{f"ep --latency {word}": "--latency=" for word in ("-1", "nan", "inf", "x")},
    **{f"ep --bandwidth {word}": "--bandwidth=" for word in ("-1", "0", "nan", "inf")},
    "ep --scale 0": "--scale=0",
    "ep --batch-divisor 0": "--batch-divisor=0",
    "ep --study nope": "study=nope",
    "ep --study traces --results no": "results=no: no baseline record of zoo_olmoe",
    "ep --study skew --scale 3": "scale=3: it must divide the layer's widths",
    "ep": "--study",
    "ep --study nowhere.yaml": "nowhere.yaml: no study",
    "ep --study gamma.yaml": "gamma.yaml: no study",
    "ep --study skew --validate": "--validate: holds real ranks against the emulation",
    "ep --study skew --machine h21": "machine=h21: choose one of",
    "ep --study skew --machine h20 --latency 1e-6": "a link is either stated",
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_and_status_2(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "gamma.yaml").write_text("model: capmoe\n")
    monkeypatch.chdir(tmp_path)
    message = refusal(main, ["bench", *shlex.split(words)], tmp_path, capsys)
    assert REFUSED[words] in message
