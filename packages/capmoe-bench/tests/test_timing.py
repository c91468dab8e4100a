"""The timed layer computes what it should, and its numbers are put together rightly."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from capmoe_eval.routing.decision import Scores, group_tokens
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from torch import Tensor, nn

from capmoe_bench.ep import benchmark
from capmoe_bench.ep.layer import SHAPES, LayerSetting, decided
from capmoe_bench.ep.links import NODE, Link, balanced_link
from capmoe_bench.ep.skew import skewed_logits
from capmoe_bench.ep.studies import Shape
from capmoe_bench.ep.timing import PHASES, Pass, TimedLayer, TimedPrefill
from capmoe_bench.rounds import CPU
from capmoe_bench.timings import Spread

SETTING = LayerSetting(Shape("tiny", 16, 24, n_experts=8, top_k=2, shared=8), 2, CPU)
LOGITS_TE = skewed_logits(2.5, 40, 8, 2, layer=4)
DROPLESS = create_method("baseline")
METHODS = {
    "dropless": DROPLESS,
    "score": create_method("score", 1.0, ep_size=2),
    "local": create_method("expanded_drop", 1.0, ep_size=2),
    "global": create_method("expanded_drop", 1.0, ep_size=2, candidates="global"),
    "device": create_method("score", 1.0, ep_size=2, granularity="device"),
    "idle": create_method("expert_drop"),
}


def layer(link: Link = NODE) -> TimedLayer:
    return TimedLayer(SETTING, LOGITS_TE, link=link)


def by_hand(timed: TimedLayer, method: Method) -> Tensor:
    """The layer's output by a loop over tokens and the slots of one decision for all ranks."""
    score_TE = LOGITS_TE.softmax(dim=1)
    scores = Scores(score_TE, score_TE.topk(2, dim=1).indices)
    groups = group_tokens(torch.ones(2, 20, dtype=torch.bool), ep_size=2)
    chosen = decided(method, scores, groups)
    hidden_TH = torch.cat([rank.hidden_TH for rank in timed.ranks])
    out_TH = gated(timed.ranks[0].shared, hidden_TH)
    for token, slot in chosen.keep_TS.nonzero().tolist():
        expert = int(chosen.index_TS[token, slot])
        weights = timed.ranks[expert // 4].experts
        gate_up, down = weights.gate_up_proj[expert % 4], weights.down_proj[expert % 4]  # type: ignore[index]
        gate_H, up_H = (gate_up @ hidden_TH[token]).chunk(2)
        out_TH[token] += score_TE[token, expert] * (down @ (nn.functional.silu(gate_H) * up_H))
    return out_TH


def gated(shared: nn.Module | None, hidden_TH: Tensor) -> Tensor:
    assert shared is not None
    gate_TI, up_TI = (hidden_TH @ shared.gate_up_proj.weight.T).chunk(2, dim=1)
    return (nn.functional.silu(gate_TI) * up_TI) @ shared.down_proj.weight.T


@pytest.mark.parametrize("name", METHODS)
def test_the_emulated_layer_computes_every_kept_pair(name: str) -> None:
    timed, method = layer(), METHODS[name]
    _, output_TH = timed.run(method)
    torch.testing.assert_close(output_TH, by_hand(timed, method), rtol=1e-4, atol=1e-5)


def test_an_exchange_by_hand() -> None:
    link = Link(100.0, 0.5, "stated")
    bytes_RR = torch.tensor([[900, 10, 20], [0, 900, 40], [5, 5, 900]])
    # Rank 0 sends 30, rank 1 40, rank 2 10; rank 2 receives 60: it takes longest.
    assert link.seconds(bytes_RR) == pytest.approx(0.5 + 60 / 100)
    assert link.seconds(torch.zeros(3, 3)) == 0.5


def test_an_exchange_waits_for_the_last_rank() -> None:
    spent = [
        {"gate": 1, "decide": 5, "permute": 1, "experts": 2, "combine": 1, "shared": 9},
        {"gate": 4, "decide": 1, "permute": 3, "experts": 6, "combine": 3, "shared": 1},
    ]
    # The last is done with its gate after 4, with its decision after 6 (1 + 5), and is ready after
    # 8 (4 + 1 + 3). Then all begin together; combine ends after 3 and shared after 10 (1 + 9).
    assert layer(Link(1e12, 1.0, "stated")).seconds(spent, torch.zeros(2, 2)) == {
        **{"gate": 4, "decide": 2, "permute": 2, "dispatch": 2, "experts": 6, "return": 1},
        **{"combine": 3, "shared": 7, "total": 27},
    }


def test_a_layer_is_scaled_in_its_widths_alone() -> None:
    scaled = Shape("deepseek_v2_lite", 256, 176, 64, 6, shared=352)
    assert SHAPES["deepseek_v2_lite"].scaled(8) == scaled


def test_a_link_has_a_machines_proportion() -> None:
    """At every size, an exchange takes the share of the experts' time that it takes there."""
    rate, (flops, bandwidth, latency) = 7e6, (120e12, 450e9, 20e-6)  # of an H20
    link = balanced_link("h20", rate, torch.float32, width=4, tokens=100.0)
    # There: rows of 16·4 bfloat16, experts of 24·4, a hundred times the tokens.
    rows = 1000 * 100
    there_experts = rows * 6 * (16 * 4) * (24 * 4) / flops
    there = (latency / there_experts, rows * 64 * 2 / bandwidth / there_experts)
    here_experts = 1000 * 6 * 16 * 24 / rate
    here = (link.latency / here_experts, 1000 * 16 * 4 / link.bandwidth / here_experts)
    assert here == pytest.approx(there)
    assert "balance of H20: 0.00375 bytes per FLOP" in link.source
    assert "widths are divided by 4" in link.source


def test_an_emulated_prefill_is_its_dense_part_and_its_layers() -> None:
    link = replace(NODE, latency=0.25)
    others = [skewed_logits(3.0, 40, 8, 2, layer=n) for n in (1, 2)]
    layers = [layer(link), *(TimedLayer(SETTING, logits, link=link) for logits in others)]
    prefill = TimedPrefill(layers, 20, 5)
    seconds, logits = prefill.run(METHODS["score"])
    assert logits.shape[:2] == (4, 1)
    assert seconds["moe"] > 3 * 0.75  # three exchanges in each of three layers
    assert seconds["total"] == seconds["dense"] + seconds["moe"]
    loads = [each.load(METHODS["score"]) for each in layers]
    assert loads[1]["expert_load"] != loads[0]["expert_load"]
    whole = prefill.load(METHODS["score"])
    assert whole.pop("dropped_share") == pytest.approx(
        statistics.mean(load.pop("dropped_share") for load in loads)
    )
    assert whole == {name: np.sum([of[name] for of in loads], axis=0).tolist() for name in loads[0]}


class Scripted(TimedLayer):
    """A layer whose passes take what a script says."""

    def __init__(self, totals: Mapping[str, list[float]]) -> None:
        super().__init__(SETTING, LOGITS_TE)
        self._totals: dict[str, Iterator[float]] = {k: iter(v) for k, v in totals.items()}

    def run(self, method: Method) -> Pass:
        total = next(self._totals[method.name])
        seconds = {**dict.fromkeys(PHASES, total / 10), "experts": 2.0, "total": total}
        return seconds, torch.zeros(0)


def test_speedups_are_taken_within_a_round() -> None:
    script = {"baseline": [9.0, 4.0, 6.0, 8.0], "score": [9.0, 2.0, 4.0, 2.0]}
    timed = Scripted(script)
    ((dropless, score),) = benchmark.time_layers([timed], [METHODS["score"]], repeats=3, warmup=1)
    assert score["speedup"] == asdict(Spread.of([2.0, 1.5, 4.0]))
    assert score["speedup"]["median"] == 2.0
    assert score["seconds"]["total"]["median"] == 2.0
    before, after = (timed.load(METHODS[name]) for name in ("dropless", "score"))
    assert score["ideal_expert"] == max(before["expert_load"]) / max(after["expert_load"])
    assert score["ideal_rank"] == max(before["rank_load"]) / max(after["rank_load"]) > 1.05
    assert score["reached"] == pytest.approx((2 - 1) / (score["ideal_rank"] - 1))
    assert dropless["speedup"]["median"] == 1
    assert dropless["reached"] is None
    # The experts of the fullest rank take two seconds: three products of 16 × 24 for each pair.
    assert benchmark._expert_rate(Scripted({"baseline": [1.0] * 4})) == (
        max(before["rank_load"]) * 6 * 16 * 24 / 2.0
    )
