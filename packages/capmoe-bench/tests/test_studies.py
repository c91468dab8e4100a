"""The efficiency studies as data, the jobs they become, and where their routing is from."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.routing.decision import expert_load

from capmoe_bench.ep.benchmark import Job, plan
from capmoe_bench.ep.layer import SHAPES
from capmoe_bench.ep.skew import RecordedLoads
from capmoe_bench.ep.studies import find_studies

RESULTS = Path(__file__).parents[3] / "results" / "zoo"


def jobs(name: str, processes: int | None = None) -> list[Job]:
    (study,) = find_studies(name)
    arguments = Namespace(scale=None, batch_divisor=None, results=RESULTS)
    return plan(study, arguments, processes)[1]


def load(logits_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    return expert_load(logits_TE.topk(top_k, dim=1).indices, logits_TE.shape[1]).double()


def test_figure_1_is_taken_in_proportion() -> None:
    (trace,) = jobs("breakdown")[0].routings
    assert isinstance(trace, RecordedLoads)
    drawn = torch.tensor(trace.loads[0])
    assert (len(drawn), trace.top_k) == (64, 8)
    assert float(drawn.max()) == pytest.approx(7.229)
    assert float(drawn.sum()) == pytest.approx(82.5, abs=0.05)  # and not 64
    load_E = load(trace.logits(8192, 64, 8), 8)
    assert int(load_E.argmax()) == int(drawn.argmax())
    assert float(load_E.max() / load_E.mean()) == pytest.approx(7.229 / (82.5 / 64), rel=0.03)
    torch.testing.assert_close(
        (load_E / load_E.mean()).float(), drawn / drawn.mean(), atol=0.15, rtol=0.1
    )


def test_the_speedup_study_has_the_papers_deployments() -> None:
    found = {job.model: job for job in jobs("speedup")}
    assert {name: (job.ranks, job.layers) for name, job in found.items()} == {
        "OLMoE": (8, 2),
        "DeepSeek-V2-Lite": (8, 2),
        "Qwen1.5-MoE-Chat": (6, 2),
        "Mixtral": (8, 2),
    }
    olmoe = found["OLMoE"]
    assert [(m.name, m.uniform_gamma, m.ep_size) for m in olmoe.methods] == [
        (name, gamma, 8) for name in ("score", "expanded_drop") for gamma in (2.0, 1.5, 1.0)
    ]
    # 8192 sequences of 512: a 256th of the sequences, a quarter of each, over 8 ranks.
    (batch,) = olmoe.batches
    assert (batch.sequences, batch.prompt, batch.tokens) == (4 * 8, 128, 512 * 8)
    assert (olmoe.scale, olmoe.fewer_tokens) == (4, 1024.0)
    assert olmoe.shape == SHAPES["olmoe"].scaled(4)


def test_real_ranks_leave_out_what_they_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert [job.ranks for job in jobs("speedup", processes=4)] == [4] * 4
    assert capsys.readouterr().err == ""
    assert [job.model for job in jobs("speedup", processes=8)] == [
        "OLMoE",
        "DeepSeek-V2-Lite",
        "Mixtral",
    ]
    assert "Qwen1.5-MoE-Chat is left out, 8 ranks do not divide" in capsys.readouterr().err
    # On real ranks a model has one placement.
    models = [job.model for job in jobs("placement", processes=2)]
    assert models == ["OLMoE", "Qwen1.5-MoE-Chat", "Mixtral"]


def test_traces_have_the_records_experts() -> None:
    for job in jobs("traces"):
        assert job.shape.n_experts % job.ranks == 0
        assert [type(routing) for routing in job.routings] == [RecordedLoads] * 4
        model = str(job.routings[0].fields()["source"]).split()[0]
        paths = record_paths(RESULTS, model, "obqa")
        baselines = [
            read_record(path, RESULTS) for path in paths if path.name.startswith("baseline-")
        ]
        batch_size = load_option("model", model).batch_size
        (record,) = (
            each
            for each in baselines
            if each.cell.batch_size == batch_size and each.cell.backend == "transformers"
        )
        layer = record.layers[0]
        assert (job.shape.n_experts, job.shape.top_k) == (layer.n_experts, layer.top_k)
        assert list(job.routings[0].loads[0]) == list(layer.load_before)
