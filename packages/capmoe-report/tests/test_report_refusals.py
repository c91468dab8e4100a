"""What cannot be is refused in one line, and nothing is written."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from capmoe_eval.__main__ import main
from tests.bad_input import WRITE, refusal

REFUSED = {
    "claims": {
        "--out file": f"--out=file: {WRITE}",
        "profile=tinny": "did you mean 'tiny'",
        "profile=": "profile=: choose one of fresh, paper",
        "profile=tiny profile=zoo": "profile is set before",
        "results_dir=pipes": "results_dir=pipes: no whole record there",
        "gamma=1.0": "key=gamma",
        "results_dir=nowhere": "no such directory",
        "nope": "key=nope: choose one of profile, results_dir",
        "--nope": "--nope",
    },
    "export": {
        "": "results_dir=DIR",
        "results_dir=nowhere --parquet a": "results_dir=nowhere: no results directory with records",
        "results_dir=pipes": "export: names nothing to write; add --lm-eval OUT or --parquet FILE",
        "results_dir=pipes --parquet .": "--parquet=.: cannot be written",
        "results_dir=pipes --lm-eval file": f"--lm-eval=file: {WRITE}",
        "results_dir=pipes --lm-eval ''": "must be a path",
    },
    "replicate": {
        "": "no finished evaluation of experiment=replicate",
        "profile=fresh": "the settings of the records that `capmoe-eval table results/fresh` shows",
        "profile=tinny": "did you mean 'tiny'",
        "experiment=table1": "experiment=table1",
        "limit=0": "limit=0",
        "gamma=1": "gamma=1",
        "--out ''": "must be a path",
        "--nope": "--nope",
    },
    "report": {
        "--out file": f"--out=file: {WRITE}",
        "profile=tinny": "did you mean 'tiny'",
        "profile.name=../evil": "profile.name=../evil",
        "experiment=table1": "experiment=table1",
        "gama=1": "did you mean 'gamma'",
        "results_dir=resutls/zoo": "results_dir=resutls/zoo: no whole record there",
        "results_dir=pipes --all": "results_dir=pipes: no whole record there",
        "'results_dir=[a]'": "results_dir=['a']: must be",
        "limit=x": "limit=x: must be a whole number of at least 1",
        "--bench=none": "--bench=none: no such directory",
        "--nope": "--nope",
    },
}


@pytest.mark.parametrize(
    ("command", "words"), [(command, words) for command in REFUSED for words in REFUSED[command]]
)
def test_bad_input_is_one_line_and_status_2(
    command: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("pipes/zoo_olmoe/obqa").mkdir(parents=True)
    os.mkfifo("pipes/zoo_olmoe/obqa/score.json")
    message = REFUSED[command][words]
    assert message in refusal(main, [command, *shlex.split(words)], tmp_path, capsys)
