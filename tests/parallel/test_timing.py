"""The timed layer computes what it should, and its numbers are put together rightly."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from capmoe_eval.errors import UsageError
from capmoe_eval.method import Method
from capmoe_eval.parallel.emulation import EmulatedLayer, Link
from capmoe_eval.parallel.layer import LayerShape
from capmoe_eval.parallel.prefill import EmulatedPrefill
from capmoe_eval.parallel.skew import skewed_logits
from capmoe_eval.parallel.timing import PHASES, Clock, Load, Pass, Spread, time_methods
from tests.parallel.processes import run_ranks

CPU = torch.device("cpu")
SHAPE = LayerShape(hidden=16, intermediate=24, n_experts=8, top_k=2)
METHODS = {
    "score": Method("score", 1.0, ep_size=2),
    "local": Method("expanded_drop", 1.0, ep_size=2),
    "global": Method("expanded_drop", 1.0, ep_size=2, candidates="global"),
    "device": Method("score", 1.0, ep_size=2, granularity="device"),
    "idle": Method("expert_drop"),
}


def layer(link: Link | None = None, ranks: int = 2) -> EmulatedLayer:
    logits = skewed_logits(40, 8, 2, 2.5, seed=4)
    return EmulatedLayer(SHAPE, logits, ranks, link or Link(), device=CPU)


def by_hand(timed: EmulatedLayer, method: Method) -> Tensor:
    """Return the layer's output by a loop over ranks, tokens and experts."""
    outputs = []
    for tokens in timed._tokens:
        score_TE = tokens.logits_TE.softmax(dim=1)
        routed = timed._router(tokens, method, lambda _: _nothing())
        kept_TS, weight_TS = routed.packed.keep_TS, routed.weight_TS
        out_TH = torch.zeros_like(tokens.hidden_TH)
        for token, (keep_S, weight_S) in enumerate(zip(kept_TS, weight_TS, strict=True)):
            for keep, weight in zip(keep_S, weight_S, strict=True):
                if keep:
                    (expert,) = (score_TE[token] == weight).nonzero()[0].tolist()
                    out_TH[token] += weight * run_expert(timed, expert, tokens.hidden_TH[token])
        outputs.append(out_TH)
    return torch.cat(outputs)


class _nothing:  # noqa: N801 - reads as a statement
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def run_expert(timed: EmulatedLayer, expert: int, hidden_H: Tensor) -> Tensor:
    local = 8 // len(timed._experts)
    owner = timed._experts[expert // local]
    gate, up = (owner.gate_up_proj[expert % local] @ hidden_H).chunk(2)  # type: ignore[index]
    return owner.down_proj[expert % local] @ (nn.functional.silu(gate) * up)  # type: ignore[index]


@pytest.mark.parametrize("name", ["dropless", *METHODS])
def test_the_emulated_layer_computes_every_kept_pair(name: str) -> None:
    timed, method = layer(), METHODS.get(name, Method("baseline"))
    torch.testing.assert_close(
        timed.run(method).output_TH, by_hand(timed, method), rtol=1e-4, atol=1e-5
    )


def test_loads_bytes_and_drops() -> None:
    timed = layer()
    full, cut = timed.load(Method("baseline")), timed.load(METHODS["score"])
    assert full.kept == sum(full.expert_load) == sum(full.rank_load) == 80
    assert full.dropped_share == 0
    assert max(full.expert_load) == pytest.approx(2.5 * 10, abs=2)
    assert max(cut.expert_load) <= 10  # C = 1.0 · 20 · 2 / 8 = 5 from each of two ranks
    assert cut.dropped_share == pytest.approx((80 - cut.kept) / 80)
    assert full.rank_load == [sum(full.expert_load[:4]), sum(full.expert_load[4:])]
    assert full.sent_bytes % (16 * 4) == 0 and 0 < full.sent_bytes < 80 * 16 * 4


def test_more_candidates_of_other_ranks_send_more() -> None:
    """Figure 6: global expansion's communication grows, local expansion's does not."""
    timed = layer()
    sent = {name: timed.load(method).sent_bytes for name, method in METHODS.items()}
    assert sent["local"] <= sent["score"] < sent["global"]


def test_an_exchange_by_hand() -> None:
    link = Link(bandwidth=100.0, latency=0.5)
    bytes_RR = torch.tensor([[900, 10, 20], [0, 900, 40], [5, 5, 900]])
    # Rank 0 sends 30, rank 1 40, rank 2 10; rank 2 receives 60: it takes longest.
    assert link.seconds(bytes_RR) == pytest.approx(0.5 + 60 / 100)
    assert link.seconds(torch.zeros(3, 3)) == 0.5


def test_the_emulated_total_is_that_of_the_slowest_rank() -> None:
    seconds = layer(Link(bandwidth=1e12, latency=0.25)).run(Method("baseline")).seconds
    assert set(seconds) == {*PHASES, "total"}
    assert seconds["dispatch"] == pytest.approx(0.5, abs=1e-3)  # the counts, then the rows
    assert seconds["return"] == pytest.approx(0.25, abs=1e-3)
    parts = sum(seconds[phase] for phase in PHASES)
    assert max(seconds.values()) == seconds["total"] <= parts + 1e-9


def test_an_emulated_prefill_is_its_dense_part_and_its_layers() -> None:
    prefill = EmulatedPrefill(SHAPE, layer(Link(latency=0.25)), 3, 20, 5, device=CPU)
    done = prefill.run(METHODS["score"])
    assert done.output_TH.shape[:2] == (4, 1)
    assert done.seconds["moe"] > 3 * 0.75  # three exchanges in each of three layers
    assert done.seconds["total"] == done.seconds["dense"] + done.seconds["moe"]
    with pytest.raises(UsageError, match="prompt=7: 20 tokens"):
        EmulatedPrefill(SHAPE, layer(), 3, 20, 7, device=CPU)


def test_a_clock_waits_and_adds_up() -> None:
    waited: list[int] = []
    clock = Clock(CPU, lambda: waited.append(1))
    for _ in range(2):
        with clock.lap("work"):
            time.sleep(0.01)
    assert 0.02 <= clock.seconds["work"] < 0.2 and len(waited) == 2


class Scripted:
    """A layer whose passes take what a script says."""

    def __init__(self, totals: Mapping[str, list[float]]) -> None:
        self._totals: dict[str, Iterator[float]] = {k: iter(v) for k, v in totals.items()}

    def run(self, method: Method) -> Pass:
        total = next(self._totals[method.name])
        return Pass({**dict.fromkeys(PHASES, total / 10), "total": total}, torch.zeros(0))

    def load(self, method: Method) -> Load:
        loads = {"baseline": [8, 1, 1, 2], "score": [3, 1, 1, 2]}[method.name]
        ranks = [loads[0] + loads[1], loads[2] + loads[3]]
        return Load(sum(loads), 0.0, loads, ranks, 0)


def test_speedups_are_taken_within_a_round() -> None:
    script = {"baseline": [9.0, 4.0, 6.0, 8.0], "score": [9.0, 2.0, 4.0, 2.0]}
    timings = time_methods(Scripted(script), {"score": Method("score", 1.0)}, repeats=3, warmup=1)
    score = timings["score"]
    assert score.speedup == Spread.of([2.0, 1.5, 4.0]) and score.speedup.median == 2.0
    assert score.seconds["total"].median == 2.0
    assert score.ideal_expert == 8 / 3
    assert score.ideal_rank == 9 / 4
    assert score.reached == pytest.approx((2 - 1) / (9 / 4 - 1))
    assert timings["dropless"].speedup.median == 1 and timings["dropless"].reached is None


def test_quartiles() -> None:
    assert Spread.of([1, 2, 3, 4, 5]) == Spread(3, 2, 4)
    assert Spread.of([7.0]) == Spread(7, 7, 7)


RANKED = """
import sys, torch
from datetime import timedelta
from capmoe_eval.method import Method
from capmoe_eval.parallel import World
from capmoe_eval.parallel.prefill import RankedPrefill
from capmoe_eval.parallel.skew import skewed_logits
from capmoe_eval.parallel.timing import RankedLayer, measured_link, time_methods
from tests.parallel.test_timing import CPU, METHODS, SHAPE
world = World.join(CPU, timeout=timedelta(seconds=30))
timed = RankedLayer(SHAPE, skewed_logits(40, 8, 2, 2.5, seed=4), world, device=CPU)
methods = METHODS | {"dropless": Method("baseline")}
outputs = {name: timed.run(method).output_TH for name, method in methods.items()}
loads = {name: timed.load(method) for name, method in methods.items()}
timings = time_methods(timed, METHODS, repeats=2, warmup=1)
assert all(part.median > 0 for part in timings["score"].seconds.values())
latency, bandwidth = measured_link(world, CPU, repeats=2)
assert latency > 0 and bandwidth > 0
layers = [RankedLayer(SHAPE, skewed_logits(40, 8, 2, 2.5), world, device=CPU) for _ in range(2)]
prefill = RankedPrefill(SHAPE, layers, 20, 5, device=CPU)
written = [prefill.run(methods[name]) for name in ("dropless", "score", "dropless")]
assert written[0].output_TH.shape[:2] == (4, 1) and set(written[0].seconds) == {"total"}
assert torch.equal(written[0].output_TH, written[2].output_TH)
assert not torch.equal(written[0].output_TH, written[1].output_TH)
result = (outputs, {name: vars(load) for name, load in loads.items()})
torch.save(result, f"{sys.argv[1]}/{world.rank}.pt")
"""


def test_real_ranks_compute_and_send_what_the_emulation_says(tmp_path: Path) -> None:
    run_ranks(["-c", RANKED, str(tmp_path)], 2, timeout=60)
    (first, loads), (second, same) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    timed = layer()
    assert loads == same
    for name, method in (METHODS | {"dropless": Method("baseline")}).items():
        together = torch.cat([first[name], second[name]])
        torch.testing.assert_close(together, timed.run(method).output_TH, rtol=1e-4, atol=1e-5)
        assert loads[name] == vars(timed.load(method)), name
