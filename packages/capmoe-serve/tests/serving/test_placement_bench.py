"""The benchmark `placement`, as small as it can be: loads of ranks, and which steps they are of."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from bench_runs import bench

from capmoe_serve.bench.placement import outcomes
from capmoe_serve.trace import Trace


def test_placement(tmp_path: Path) -> None:
    few = ["--models", "zoo_olmoe", "--limit", "4", "--batch", "2"]
    status, content = bench(tmp_path, "placement", *few)
    assert status == 0
    rows = {
        (row["planned_on"], row["judged_on"], row["method"]): row for row in content["balances"]
    }
    assert len(rows) == len(content["balances"]) == 3 * 6 + 2 * 2
    # Decode steps and prompts are never planned on one another.
    stale = {key[:2] for key in rows if key[0] != key[1]}
    assert stale == {("piqa", "winogrande"), ("winogrande", "piqa")}
    for (*_, method), row in rows.items():
        assert bool(row["drop_rate"]) == method.startswith("Token Drop")
        assert row["drop_rate"] or row["straggler"] >= 1
    for task, of in (("piqa", "prompts"), ("gsm8k", "decode steps")):
        of_task = {method: row for (*on, method), row in rows.items() if on == [task, task]}
        assert {row["of"] for row in of_task.values()} == {of}
        shares = [of_task[f"Token Drop γ={gamma}"]["drop_rate"] for gamma in (2, 1.5, 1)]
        assert shares == sorted(shares)
        assert shares[-1] > 0


def test_placement_judges_other_steps_than_it_plans_on() -> None:
    load_SLE = np.random.default_rng(3).integers(0, 9, (6, 2, 8)) * 2
    load_SLE[:, :, 0] += 200 - load_SLE.sum(axis=2)  # 100 tokens of two experts in every step
    trace = Trace(8, load_SLE=load_SLE, top_k=2)
    judged = outcomes(trace, trace, 4)
    for name, bound in {
        "contiguous": math.inf,
        "Token Drop γ=1.5": math.ceil(1.5 * 200 / 8),
    }.items():
        factors, kept = [], 0
        for layer_E in load_SLE[3:].reshape(-1, 8):  # the second half of the steps
            left = [min(int(pairs), bound) for pairs in layer_E]
            factors.append(max(sum(left[r : r + 2]) for r in range(0, 8, 2)) / (200 / 4))
            kept += sum(left)
        assert judged[name]["straggler"] == pytest.approx(sum(factors) / len(factors))
        assert judged[name]["drop_rate"] == pytest.approx(1 - kept / (6 * 200))
    turned = Trace(8, load_SLE=load_SLE[:, :, ::-1].copy(), top_k=2)
    stale = outcomes(turned, trace, 4)
    assert set(stale) == {"EPLB", "EPLB+4"}
    assert stale["EPLB+4"]["straggler"] > judged["EPLB+4"]["straggler"]
