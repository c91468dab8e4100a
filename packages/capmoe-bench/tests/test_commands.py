"""The benchmarks as commands, as small as they can be; no time is tested."""

from __future__ import annotations

from pathlib import Path

from bench_runs import bench


def test_permutation(tmp_path: Path) -> None:
    few = ["--models", "zoo_olmoe", "--tasks", "piqa", "--limit", "32", "--batch", "16"]
    status, content = bench(tmp_path, "permutation", *few)
    assert status == 0
    changed = {
        (row["method"], row["ranks"], row["is_distinct"]): row["changed"]
        for row in content["permutations"]
    }
    # Without equal scores Score does not see the order of one group; Order does.
    assert changed["score", 1, True] == changed["baseline", 1, True] == 0
    assert changed["order", 1, True] > 0.1
    # A sequence on another rank shares the capacity with other sequences.
    assert changed["score", 8, True] > 0.02
    # Prompts that begin alike have equal scores: the order decides among them.
    assert changed["score", 1, False] > 0
    assert changed["baseline", 1, False] == 0


def test_decision(tmp_path: Path) -> None:
    shapes = ["--shapes", "small", "small_mixtral"]
    few = ["--tokens", "16384", "--layer-tokens", "8", "--rounds", "1", "--layer-rounds", "1"]
    steps = ["--step-shapes", "tiny_olmoe", "--step-tokens", "3", "8"]
    status, content = bench(tmp_path, "decision", *shapes, *few, *steps)
    assert status == 0
    assert len(content["details"]) == 4
    assert [(row["shape"], row["tokens"]) for row in content["steps"]] == [
        ("tiny_olmoe", 3),
        ("tiny_olmoe", 8),
    ]
    assert len(content["targets"]) == 12 + 4
    # What is timed against one another keeps the same pairs.
    assert all(row["equal"] for row in content["details"])
    # The one number that no clock disturbs.
    assert all(row["extra_matrices"] <= 2 for row in content["details"])
    assert {t["target"] for t in content["targets"] if t["unit"] == "share"} == {0.1}
