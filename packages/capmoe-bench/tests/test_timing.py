"""The timed layer computes what it should, and its numbers are put together rightly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

import pytest
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from torch import Tensor, nn

from capmoe_bench.ep.emulation import (
    NODE,
    EmulatedLayer,
    ReferenceMachine,
    balanced,
    exchange_seconds,
)
from capmoe_bench.ep.layer import SHAPES, LayerSetting
from capmoe_bench.ep.measure import TimedPrefill, summed, time_layers
from capmoe_bench.ep.skew import Skew
from capmoe_bench.ep.studies import Link, Shape
from capmoe_bench.ep.timing import PHASES, PairLoad, Pass
from capmoe_bench.timings import Spread

CPU = torch.device("cpu")
SHAPE = Shape("tiny", hidden=16, intermediate=24, n_experts=8, top_k=2, shared=8)
METHODS = {
    "score": create_method("score", 1.0, ep_size=2),
    "local": create_method("expanded_drop", 1.0, ep_size=2),
    "global": create_method("expanded_drop", 1.0, ep_size=2, candidates="global"),
    "device": create_method("score", 1.0, ep_size=2, granularity="device"),
    "idle": create_method("expert_drop"),
}


def layer(link: Link | None = None, ranks: int = 2) -> EmulatedLayer:
    return EmulatedLayer(setting(ranks), Skew(2.5).logits(40, 8, 2, layer=4), link or NODE)


def setting(ranks: int = 2, shape: Shape = SHAPE) -> LayerSetting:
    return LayerSetting(shape, ranks, CPU)


def by_hand(timed: EmulatedLayer, method: Method) -> Tensor:
    """Return the layer's output by a loop over ranks, tokens and experts."""
    outputs = []
    for rank in timed._ranks:
        score_TE = rank.logits_TE.softmax(dim=1)
        routed = rank.route(method, lambda _: _nothing())
        kept_TS, weight_TS = routed.packed.keep_TS, routed.weight_TS
        out_TH = torch.zeros_like(rank.hidden_TH)
        for token, (keep_S, weight_S) in enumerate(zip(kept_TS, weight_TS, strict=True)):
            for keep, weight in zip(keep_S, weight_S, strict=True):
                if keep:
                    (expert,) = (score_TE[token] == weight).nonzero()[0].tolist()
                    out_TH[token] += weight * run_expert(timed, expert, rank.hidden_TH[token])
        outputs.append(out_TH + run_shared(timed, rank.hidden_TH))
    return torch.cat(outputs)


class _nothing:  # noqa: N801 - reads as a statement
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def run_expert(timed: EmulatedLayer, expert: int, hidden_H: Tensor) -> Tensor:
    local = 8 // len(timed._ranks)
    owner = timed._ranks[expert // local].experts
    gate, up = (owner.gate_up_proj[expert % local] @ hidden_H).chunk(2)  # type: ignore[index]
    return owner.down_proj[expert % local] @ (nn.functional.silu(gate) * up)  # type: ignore[index]


def run_shared(timed: EmulatedLayer, hidden_TH: Tensor) -> Tensor:
    shared = timed._ranks[0].shared
    assert shared is not None
    gate_TI, up_TI = (hidden_TH @ shared.gate_up_proj.weight.T).chunk(2, dim=1)
    return (nn.functional.silu(gate_TI) * up_TI) @ shared.down_proj.weight.T


@pytest.mark.parametrize("name", ["dropless", *METHODS])
def test_the_emulated_layer_computes_every_kept_pair(name: str) -> None:
    timed, method = layer(), METHODS.get(name, create_method("baseline"))
    torch.testing.assert_close(
        timed.run(method).output_TH, by_hand(timed, method), rtol=1e-4, atol=1e-5
    )


def test_an_exchange_by_hand() -> None:
    link = Link(100.0, 0.5, "stated")
    bytes_RR = torch.tensor([[900, 10, 20], [0, 900, 40], [5, 5, 900]])
    # Rank 0 sends 30, rank 1 40, rank 2 10; rank 2 receives 60: it takes longest.
    assert exchange_seconds(link, bytes_RR) == pytest.approx(0.5 + 60 / 100)
    assert exchange_seconds(link, torch.zeros(3, 3)) == 0.5


def test_the_emulated_total_is_the_sum_of_its_phases() -> None:
    seconds = dict(layer(Link(1e12, 0.25, "stated")).run(create_method("baseline")).seconds)
    total = seconds.pop("total")
    assert tuple(seconds) == PHASES
    assert seconds["dispatch"] == pytest.approx(0.5, abs=1e-3)  # the counts, then the rows
    assert seconds["return"] == pytest.approx(0.25, abs=1e-3)
    assert sum(seconds.values()) == pytest.approx(total)


def test_an_exchange_waits_for_the_last_rank() -> None:
    timed = layer(Link(1e12, 1.0, "stated"))
    spent = [
        {"gate": 1, "decide": 5, "permute": 1, "experts": 2, "combine": 1, "shared": 9},
        {"gate": 4, "decide": 1, "permute": 3, "experts": 6, "combine": 3, "shared": 1},
    ]
    # The last is done with its gate after 4, with its decision after 6 (1 + 5), and is ready after
    # 8 (4 + 1 + 3). Then all begin together; combine ends after 3 and shared after 10 (1 + 9).
    assert timed._seconds(spent, torch.zeros(2, 2)) == {
        **{"gate": 4, "decide": 2, "permute": 2, "dispatch": 2, "experts": 6, "return": 1},
        **{"combine": 3, "shared": 7, "total": 27},
    }


def test_a_layer_is_scaled_in_its_widths_alone() -> None:
    assert SHAPES["deepseek_v2_lite"].scaled(8) == Shape(
        "deepseek_v2_lite", 256, 176, 64, 6, shared=352
    )
    with pytest.raises(UsageError, match=r"scale=3: .*hidden 2048, intermediate 1024"):
        SHAPES["olmoe"].scaled(3)


def test_a_link_has_a_machines_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every size, an exchange takes the share of the experts' time that it takes there."""
    machine = ReferenceMachine("M", flops=1e12, bandwidth=5e9, latency=1e-3)
    assert machine.balance == 0.005
    timed = layer()
    monkeypatch.setattr(
        timed, "run", lambda _: Pass({"experts": 2.0}, torch.zeros(0)), raising=True
    )
    busiest = max(timed.load(create_method("baseline")).rank_load)
    rate = busiest * 6 * 16 * 24 / 2.0
    link = balanced(timed, machine, width=4, tokens=100.0)
    # There: rows of 16·4 bfloat16, experts of 24·4, a hundred times the tokens.
    rows = 1000 * 100
    there_experts = rows * 6 * (16 * 4) * (24 * 4) / machine.flops
    there = (machine.latency / there_experts, rows * 64 * 2 / machine.bandwidth / there_experts)
    here_experts = 1000 * 6 * 16 * 24 / rate
    here = (link.latency / here_experts, 1000 * 16 * 4 / link.bandwidth / here_experts)
    assert here == pytest.approx(there)
    assert "balance of M" in link.source
    assert "widths are divided by 4" in link.source


def test_an_emulated_prefill_is_its_dense_part_and_its_layers() -> None:
    link = replace(NODE, latency=0.25)
    first = layer(link)
    others = [Skew(3.0).logits(40, 8, 2, layer=n) for n in (1, 2)]
    layers = [first, *(EmulatedLayer(setting(), logits, link) for logits in others)]
    prefill = TimedPrefill(layers, 20, 5)
    done = prefill.run(METHODS["score"])
    assert done.output_TH.shape[:2] == (4, 1)
    assert done.seconds["moe"] > 3 * 0.75  # three exchanges in each of three layers
    assert done.seconds["total"] == done.seconds["dense"] + done.seconds["moe"]
    one_by_one = [each.load(METHODS["score"]) for each in layers]
    whole = prefill.load(METHODS["score"])
    assert whole == summed(one_by_one)
    assert whole.kept == sum(load.kept for load in one_by_one)
    assert whole.fullest_rank == sum(max(load.rank_load) for load in one_by_one)
    assert one_by_one[1].expert_load != one_by_one[0].expert_load


class Scripted:
    """A layer whose passes take what a script says."""

    def __init__(self, totals: Mapping[str, list[float]]) -> None:
        self._totals: dict[str, Iterator[float]] = {k: iter(v) for k, v in totals.items()}

    def run(self, method: Method) -> Pass:
        total = next(self._totals[method.name])
        return Pass({**dict.fromkeys(PHASES, total / 10), "total": total}, torch.zeros(0))

    def load(self, method: Method) -> PairLoad:
        loads = {"baseline": [8, 1, 1, 2], "score": [3, 1, 1, 2]}[method.name]
        ranks = [loads[0] + loads[1], loads[2] + loads[3]]
        return PairLoad(sum(loads), 0.0, loads, ranks, 0, max(loads), max(ranks))


def test_speedups_are_taken_within_a_round() -> None:
    script = {"baseline": [9.0, 4.0, 6.0, 8.0], "score": [9.0, 2.0, 4.0, 2.0]}
    layer = Scripted(script)
    (rows,) = time_layers([layer], [create_method("score", 1.0)], repeats=3, warmup=1)
    dropless, score = rows
    assert score["speedup"] == asdict(Spread.of([2.0, 1.5, 4.0]))
    assert score["speedup"]["median"] == 2.0
    assert score["seconds"]["total"]["median"] == 2.0
    assert score["ideal_expert"] == 8 / 3
    assert score["ideal_rank"] == 9 / 4
    assert score["reached"] == pytest.approx((2 - 1) / (9 / 4 - 1))
    assert dropless["speedup"]["median"] == 1
    assert dropless["reached"] is None
