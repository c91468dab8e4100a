"""The efficiency studies as data, the jobs they become, and routing with a wanted imbalance."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.routing.decision import expert_load
from capmoe_eval.wrapper.session import capacity_aware

from capmoe_bench.ep.benchmark import Job, plan
from capmoe_bench.ep.layer import SHAPES, LayerSetting
from capmoe_bench.ep.skew import RecordedLoads, Skew, peak_load, skewed_model
from capmoe_bench.ep.studies import Shape, find_studies
from capmoe_bench.rounds import CPU

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


def test_peak_load_by_hand() -> None:
    logits = torch.tensor([[3.0, 2, 1, 0], [3, 1, 2, 0], [3, 0, 1, 2]])
    # Expert 0 is chosen three times, the others once each, of six choices over four experts.
    assert peak_load(logits, 2) == pytest.approx(3 / 1.5)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("n_experts", "top_k", "peak"),
    [
        (64, 8, 2.0),
        (64, 8, 4.0),
        (64, 8, 7.0),
        (60, 4, 7.0),
        (128, 8, 4.0),
        (8, 2, 2.0),
        (8, 2, 4.0),
    ],
)
def test_the_fullest_expert_has_the_wanted_load(
    n_experts: int, top_k: int, peak: float, together: bool
) -> None:
    logits = Skew(peak, together).logits(6000, n_experts, top_k)
    assert peak_load(logits, top_k) == pytest.approx(peak, rel=0.04)


def test_the_popular_experts_stand_together_or_apart() -> None:
    def heaviest_block(together: bool) -> float:
        logits = Skew(4.0, together).logits(4000, 64, 8)
        chosen = logits.topk(8, dim=1).indices // 8
        return float(torch.bincount(chosen.reshape(-1), minlength=8).max()) / (4000 * 8 / 8)

    assert heaviest_block(True) > 1.5 * heaviest_block(False)


def test_a_recorded_load_is_met() -> None:
    recorded_E = torch.tensor([900.0, 300, 200, 200, 150, 150, 80, 20])
    logits_TE = RecordedLoads("seen", (tuple(recorded_E.tolist()),), 2).logits(8000, 8, 2)
    share_E = (load(logits_TE, 2) / 16000).float()
    torch.testing.assert_close(share_E, recorded_E / recorded_E.sum(), atol=0.01, rtol=0.05)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Skew(0.5), r"8 experts and 2 per token .* 1 to 4 times"),
        (Skew(4.1), r"8 experts and 2 per token .* 1 to 4 times"),
        (RecordedLoads("seen", ((9.0, *[1.0] * 7),), 2), "no top-2 routing"),
    ],
)
def test_a_load_that_no_routing_has_is_refused(routing: Skew | RecordedLoads, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        routing.logits(10, 8, 2)


@pytest.mark.parametrize(("n_experts", "top_k", "peak"), [(16, 4, 2.5), (8, 2, 2.0)])
def test_a_skewed_model_has_the_wanted_peak_in_every_layer(
    n_experts: int, top_k: int, peak: float
) -> None:
    setting = LayerSetting(Shape("flat", 64, 32, n_experts, top_k, 0), 1, CPU)
    model, tokens_BS, peaks = skewed_model(setting, layers=2, batch=4, prompt=64, peak=peak)
    assert peaks == pytest.approx([peak, peak], rel=0.1)
    seen: list[float] = []
    with torch.no_grad(), capacity_aware(model, "baseline") as meter:
        model(input_ids=tokens_BS, use_cache=False)
        seen = [layer["peak"]["expert_before"]["last"] for layer in meter.report()["layers"]]
    assert seen == pytest.approx(peaks, abs=0.05)
