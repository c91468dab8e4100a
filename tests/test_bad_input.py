"""Whatever cannot be is refused in one line, with status 2, before a model is loaded."""

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from lm_eval.tasks._index import TaskIndex

from capmoe_eval.__main__ import main
from capmoe_eval.evaluation import loading, progress
from tests.bad_input import refusal, rows

ROWS = list(rows())
# Only the model can say these.
OF_THE_MODEL = (
    *("model.pretrained=zoo:", "model.tokenizer=", "attention=flash_attention_2"),
    *("tasks.obqa.fewshot=5000", "experiment=banking77", "device=cuda:99"),
)
OBQA = "allenai/openbookqa"
LM_EVAL_FILES = {
    "gamma.yaml": ("capmoe", "gamma: 1.0}"),
    "hf.yaml": ("hf", "gamma: 1.0}"),
    "folder.yaml": ("capmoe", "dtype: float32}\ninclude_path: /no/such"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, hub: Path) -> Path:
    """A directory with what the rows name."""
    place = tmp_path_factory.mktemp("place")
    (place / "file").write_text("")
    (place / "record.json").write_text("{}")
    (place / "pipes/zoo_olmoe/obqa").mkdir(parents=True)
    os.mkfifo(place / "pipes/zoo_olmoe/obqa/score.json")
    for name, (model, options) in LM_EVAL_FILES.items():
        settings = f"model: {model}\ntasks: [piqa]\nmodel_args: {{pretrained: x, {options}\n"
        (place / name).write_text(settings)
    for name in ("truncated", "columns"):
        shutil.copytree(hub / OBQA, place / name / OBQA)
    for path in (place / "truncated").rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:-20])
    for path in (place / "columns").rglob("*.parquet"):
        pq.write_table(pq.read_table(path).drop(["question_stem"]), path)
    return place


@pytest.fixture(scope="module", autouse=True)
def index_once() -> Iterator[None]:
    """Have lm-eval index its 14,000 tasks once."""
    build, built = TaskIndex.build, {}

    def cached(paths: list[Path], **options: object) -> dict[str, object]:
        for path in paths:
            if path not in built:
                built[path] = build([path], **options)
        return {name: entry for path in paths for name, entry in built[path].items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskIndex, "build", staticmethod(cached))
        yield


@pytest.mark.parametrize(
    ("command", "words", "said"), ROWS, ids=[f"{c} {w}"[:80] for c, w, _ in ROWS]
)
def test_bad_input_is_one_line_and_status_2(
    command: str,
    words: str,
    said: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not words.startswith(OF_THE_MODEL):
        monkeypatch.setattr(loading, "load_lm", lambda *_, **__: pytest.fail("loads the model"))
    monkeypatch.setattr(progress, "EVERY", 1e6)  # what takes long is a line, too
    monkeypatch.setattr(logging, "raiseExceptions", False)  # lm-eval's log keeps an older stderr
    monkeypatch.chdir(place)
    line = [command, *shlex.split(words)]
    monkeypatch.setattr(sys, "argv", ["capmoe-eval", *line])
    assert said in refusal(main, line, place, capsys)
