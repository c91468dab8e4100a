"""A cell in the steps of an engine: its numbers, its proofs, and that it can be repeated."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation import evaluate
from capmoe_eval.evaluation.run import load_lm, run, task_library, with_documents
from capmoe_eval.experiment.record import Record
from lm_eval.api.instance import Instance
from tests.records import planned

from capmoe_serve.server.local import end_engine
from capmoe_serve.trace import load_trace
from server.engines import NEEDS_VLLM

pytestmark = [NEEDS_VLLM, pytest.mark.slow]

SCORE = ("model=zoo_olmoe", "method=score", "gamma=1.0", "backend=vllm")


@pytest.fixture(scope="module", autouse=True)
def _one_engine() -> Iterator[None]:
    """End the last engine, which holds memory."""
    yield
    end_engine()


def computed(root: Path, *overrides: str) -> Record:
    """The record of a cell, computed now."""
    plans = planned(*overrides, f"results_dir={root}", "overwrite=true")
    summary = run(plans)
    assert not summary.failures
    (record,) = summary.records
    return record


def repeatable(record: Record) -> dict[str, Any]:
    """What a second computation of a record's cell gives, too."""
    part = {key: value for key, value in record.capmoe.items() if key != "checksum"}
    timed = {k: v for k, v in part["provenance"].items() if k not in ("date", "seconds")}
    return {**part, "provenance": timed}


def test_a_cell_is_proven_and_can_be_repeated(tmp_path: Path) -> None:
    words = (*SCORE, "tasks=[obqa]", "limit=20")
    first = computed(tmp_path, *words)
    assert first.load.dropped > 0
    assert not first.proofs.broken
    open_proofs = {name for name, proof, _ in first.proofs.recorded() if not proof.passed}
    assert open_proofs <= {"outputs_as_defined"}  # of an engine no output is at hand
    assert first.proofs.examined
    server = first.server
    assert (server.max_num_seqs, server.max_num_batched_tokens) == (64, 2048)
    assert sum(prompt * steps for prompt, _, steps in server.rows) == first.load.tokens
    assert server.steps == first.load.forwards == 2  # 80 requests, 64 at a time
    (answers,) = first.documents.values()
    assert set(answers.batches) == {0, 1}
    assert first.provenance.versions["vllm"]
    # On the same engine, and on another one.
    again = computed(tmp_path, *words)
    end_engine()
    assert repeatable(computed(tmp_path, *words)) == repeatable(again) == repeatable(first)


def test_the_engines_settings_decide_the_steps(tmp_path: Path) -> None:
    words = (*SCORE, "tasks=[obqa]", "limit=20")
    chunks = computed(tmp_path, *words, "max_num_batched_tokens=64")
    rows = [prompt + decode for prompt, decode, _ in chunks.server.rows]
    assert max(rows) == rows[0] == 64
    few = computed(tmp_path, *words, "batch_size=8")
    assert few.server.steps == 10
    dealt = computed(tmp_path, *words, "shuffle=0")
    assert dealt.server is not None
    tokens = {record.load.tokens for record in (chunks, few, dealt)}
    assert len(tokens) == 1
    assert len({str(record.server.rows) for record in (chunks, few, dealt) if record.server}) == 3
    assert repeatable(computed(tmp_path, *words, "shuffle=0")) == repeatable(dealt)


def test_steps_mix_prompts_and_generated_tokens(tmp_path: Path) -> None:
    words = (*SCORE, "tasks=[gsm8k]", "limit=6", "max_num_batched_tokens=1024")
    record = computed(tmp_path, *words, "decode=constrained", f"save_trace={tmp_path / 'traces'}")
    rows = record.server.rows
    assert any(prompt and decode for prompt, decode, _ in rows)
    assert rows[-1][:1] == (0,)
    assert record.load.tokens == sum((prompt + decode) * steps for prompt, decode, steps in rows)
    assert record.load.decode.drop_rate > 0
    (path,) = (tmp_path / "traces").rglob("*.npz")
    assert load_trace(path).n_tokens == record.load.tokens


def test_a_step_that_fails_leaves_no_request_behind(tmp_path: Path) -> None:
    (plan,) = with_documents(planned(*SCORE, "tasks=[obqa]", "limit=4", f"results_dir={tmp_path}"))
    library, lm = task_library([plan]), load_lm(plan)
    first = evaluate.evaluate(plan, lm, library)

    def fail(*_: object) -> None:
        raise RuntimeError("stopped")

    lm.on_progress = fail
    with pytest.raises(RuntimeError, match="stopped"):
        evaluate.evaluate(plan, lm, library)
    lm.on_progress = lambda *_: None
    assert repeatable(evaluate.evaluate(plan, lm, library)) == repeatable(first)


def test_an_engine_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    (plan,) = planned(*SCORE, "tasks=[obqa]", f"results_dir={tmp_path}")
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    load_lm(plan)
    assert torch.equal(torch.rand(1), expected)
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_what_an_engines_prompt_loses_is_noted_by_document(tmp_path: Path) -> None:
    """It keeps a place for a token more than transformers does."""
    places, sizes = 32, (40, 31, 30, 3)
    words = ("model=zoo_olmoe", f"model.max_length={places}", "method=baseline", "backend=vllm")
    (plan,) = planned(*words, "tasks=[obqa]", f"results_dir={tmp_path}")
    lm = load_lm(plan)
    ends = {"loglikelihood": " tea", "generate_until": {"until": ["\n\n"], "max_gen_toks": 2}}
    for (kind, end), shuffle in itertools.product(ends.items(), (None, 0)):
        lm.set_batches(plan.cell.batch_size, shuffle, plan.cell.max_num_batched_tokens)
        lm.route(plan.cell.method)
        asked = [
            Instance(kind, {}, (" tea" * size, end), 0, ("t", n, 1)) for n, size in enumerate(sizes)
        ]
        getattr(lm, kind)(asked)
        # A continuation of one token and one that is generated, or two that are generated.
        assert lm.truncated == {("t", 0): 40 + 2 - places, ("t", 1): 31 + 2 - places}
        assert sorted(lm.batches) == [("t", n) for n in range(len(sizes))]


def test_what_vllm_cannot_run_is_refused_in_one_line(tmp_path: Path) -> None:
    (plan,) = planned("model=tiny_olmoe", *SCORE[1:], "tasks=[obqa]", f"results_dir={tmp_path}")
    with pytest.raises(UsageError, match=r"vLLM cannot run this model here \(.*head") as error:
        load_lm(plan)
    assert "\n" not in str(error.value)
    (other,) = planned(*SCORE, "tasks=[obqa]", f"results_dir={tmp_path}")
    with pytest.raises(UsageError, match="device=cuda:1: this vLLM runs on"):
        load_lm(dataclasses.replace(other, device="cuda:1"))
