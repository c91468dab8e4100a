"""The efficiency studies as data, the jobs they become, and routing with a wanted imbalance."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.paper.printed import figure
from capmoe_eval.routing.decision import expert_load
from capmoe_eval.wrapper.session import capacity_aware
from timing_files import committed

from capmoe_bench.ep.benchmark import Job, plan
from capmoe_bench.ep.layer import LayerSetting
from capmoe_bench.ep.skew import logits_of_loads, peak_load, skewed_logits, skewed_model
from capmoe_bench.ep.studies import Shape, find_studies
from capmoe_bench.rounds import CPU
from capmoe_bench.timings import STUDIES

RESULTS = Path(__file__).parents[3] / "results" / "zoo"


@functools.cache
def jobs(name: str, processes: int | None = None) -> list[Job]:
    (study,) = find_studies(name)
    return plan(study, RESULTS, CPU, torch.float32, processes)


@pytest.mark.parametrize("name", STUDIES)
def test_the_committed_times_are_of_the_study(name: str) -> None:
    """Models, deployments, widths, batches and routings, each with its reason."""
    runs = committed(name)["runs"]
    for (case, setting, batches, routings), run in zip(jobs(name), runs, strict=True):
        planned = case.title, setting.ranks, vars(setting.shape), case.why
        assert planned == tuple(run[key] for key in ("model", "ranks", "shape", "why"))
        pairs = list(itertools.product(batches, routings))
        for (batch, (source, _)), point in zip(pairs, run["points"], strict=True):
            sizes = [point[key] for key in ("batch", "prompt", "place", "tokens_per_rank")]
            assert sizes == [*vars(batch).values(), batch.tokens // setting.ranks]
            assert source.items() <= point["routing"].items()


def test_figure_1_is_taken_in_proportion() -> None:
    ((_, setting, _, routings),) = jobs("breakdown")
    assert (setting.shape.n_experts, setting.shape.top_k) == (64, 8)
    drawn = torch.tensor(figure("fig1_load_svg_vector"))  # which sums to 82.5, not to 64
    ((_, logits),) = routings
    chosen_TK = logits(8192, 64, 8).topk(8, dim=1).indices
    load_E = expert_load(chosen_TK, 64).double()
    assert float(load_E.max() / load_E.mean()) == pytest.approx(7.229 / (82.5 / 64), rel=0.03)
    torch.testing.assert_close(
        (load_E / load_E.mean()).float(), drawn / drawn.mean(), atol=0.15, rtol=0.1
    )


def test_real_ranks_leave_out_what_they_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert [case.ranks for case, *_ in jobs("speedup", processes=4)] == [4] * 4
    assert capsys.readouterr().err == ""
    models = [case.title for case, *_ in jobs("speedup", processes=8)]
    assert models == ["OLMoE", "DeepSeek-V2-Lite", "Mixtral"]
    assert "Qwen1.5-MoE-Chat is left out, 8 ranks do not divide" in capsys.readouterr().err
    # On real ranks a model has one placement.
    models = [case.title for case, *_ in jobs("placement", processes=2)]
    assert models == ["OLMoE", "Qwen1.5-MoE-Chat", "Mixtral"]


def test_traces_have_the_records_loads() -> None:
    for case, setting, _, routings in jobs("traces"):
        assert case.routing
        shape, batch_size = setting.shape, load_option("model", case.routing).batch_size
        (record,) = (
            record
            for path in record_paths(RESULTS, case.routing, "obqa")
            if path.name.startswith("baseline-")
            and (record := read_record(path, RESULTS)).cell.batch_size == batch_size
            and record.cell.backend == "transformers"
        )
        # A routing begins with its own layer and goes on with those after it.
        _, logits = routings[-1]
        for layer, of_record in enumerate((record.layers[-1], record.layers[0])):
            seen_E = torch.tensor(of_record.load_before).double()
            logits_TE = logits(4096, shape.n_experts, shape.top_k, layer=layer)
            load_E = expert_load(logits_TE.topk(shape.top_k, dim=1).indices, shape.n_experts)
            share_E = load_E.double() / load_E.sum()
            torch.testing.assert_close(share_E, seen_E / seen_E.sum(), atol=0.01, rtol=0.05)


@pytest.mark.parametrize(
    ("n_experts", "top_k", "peak"),
    [(64, 8, 2.0), (64, 8, 7.0), (60, 4, 7.0), (128, 8, 4.0), (8, 2, 4.0)],
)
def test_the_fullest_expert_has_the_wanted_load(n_experts: int, top_k: int, peak: float) -> None:
    logits_TE = skewed_logits(peak, 6000, n_experts, top_k)
    assert peak_load(logits_TE, top_k) == pytest.approx(peak, rel=0.04)


def test_a_load_that_no_routing_has_is_refused() -> None:
    for peak in (0.5, 4.1):
        with pytest.raises(UsageError, match=r"8 experts and 2 per token .* 1 to 4 times"):
            skewed_logits(peak, 10, 8, 2)
    with pytest.raises(UsageError, match="no top-2 routing"):
        logits_of_loads([[9.0, *[1.0] * 7]], 10, 8, 2)


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
