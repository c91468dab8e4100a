"""Claims on speedups: directions alone, said to be emulated, never a published number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timing_files as files
from capmoe_bench.timings import Bench, read_bench
from fabricate import label

from capmoe_report.evidence import Evidence
from capmoe_report.judge import judge, paper_claims
from capmoe_report.speedup import check, facts
from capmoe_report.verdicts import Outcome

# Of the committed studies, all emulated. At γ = 2 not every model's speedup is apart from 1.
EXPECTED = {
    "accelerates": Outcome.UNDECIDED,
    "rises": Outcome.UNDECIDED,
    "whole_model": Outcome.UNDECIDED,
    "fewer_experts": Outcome.HOLDS,
    "phases_shrink": Outcome.HOLDS,
    "global_costs": Outcome.HOLDS,
    "device_gains_more": Outcome.UNDECIDED,
    "slower_when_uneven": Outcome.HOLDS,
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return read_bench(files.write_all(tmp_path_factory.mktemp("bench")))


def one_study(folder: Path, name: str, rows: list[dict[str, Any]], **other: Any) -> Bench:
    files.write(folder, files.study(name, [files.run([files.point(rows)])], **other))
    return read_bench(folder)


def verdict(name: str, bench: Bench) -> str:
    (claim,) = (claim for claim in paper_claims() if claim.id == name)
    return label(*judge(Evidence("zoo", bench=bench), [claim]))


def test_every_fact_is_judged(bench: Bench) -> None:
    assert {name: check({"fact": name}, bench)[0].verdict for name in facts()} == EXPECTED


@pytest.mark.parametrize(
    ("speedups", "outcome"),
    [
        ((1.06, 1.2), Outcome.HOLDS),  # 1.06 · 0.95 = 1.007
        ((1.04, 1.2), Outcome.UNDECIDED),  # 1.04 · 0.95 = 0.988
        ((0.9, 0.95), Outcome.FAILS),  # 0.95 · 1.05 = 0.9975
        ((0.9, 1.2), Outcome.UNDECIDED),
    ],
)
def test_a_fact_is_read_from_quartiles(
    tmp_path: Path, speedups: tuple[float, ...], outcome: Outcome
) -> None:
    method = files.label("score", 1.0)
    rows = [files.row(method | {"gamma": 1.0 + n}, s) for n, s in enumerate(speedups)]
    bench = one_study(tmp_path, "speedup", [files.row(), *rows])
    assert check({"fact": "accelerates"}, bench)[0].verdict is outcome


@pytest.mark.parametrize(
    ("seconds", "outcome"),
    [
        ((1.0, 1.2), Outcome.HOLDS),
        ((1.2, 1.0), Outcome.FAILS),
        ((1.0, 1.02), Outcome.UNDECIDED),
        ((1.0, 1.2, 1.5), Outcome.HOLDS),
        ((1.2, 1.0, 1.5), Outcome.UNDECIDED),  # not from every peak to the next
    ],
)
def test_latency_follows_the_peak(
    tmp_path: Path, seconds: tuple[float, ...], outcome: Outcome
) -> None:
    points = [
        files.point(
            [files.row(phases={"experts": value})],
            routing={"source": "peak", "peak": 2.0 + number},
        )
        for number, value in enumerate(seconds)
    ]
    files.write(tmp_path, files.study("skew", [files.run(points)]))
    assert check({"fact": "slower_when_uneven"}, read_bench(tmp_path))[0].verdict is outcome


def test_no_emulation_confirms_or_refutes_a_printed_number(bench: Bench) -> None:
    new, old = (
        judge(material, paper_claims())
        for material in (Evidence("zoo", bench=bench), Evidence("zoo"))
    )
    for claim, timed, untimed in zip(paper_claims(), new, old, strict=True):
        of_timings = [findings for kind, findings in timed.checks if kind == "speedup"]
        assert not of_timings or "emulated" in timed.scope
        if claim.kind == "number":
            assert timed.verdict in (untimed.verdict, "not shown")
            assert all(len(findings) == 1 for findings in of_timings)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("emulated", "not shown (the opposite, but emulated)"),
        ("measured", "contradicted in direction, measured on 8 ranks"),
    ],
)
def test_only_real_ranks_contradict(tmp_path: Path, kind: str, expected: str) -> None:
    slower = [files.row(), files.row(files.label("score", 1.0), 0.5)]
    assert verdict("s51-accelerates", one_study(tmp_path, "speedup", slower, kind=kind)) == expected


def test_without_files_the_command_is_told() -> None:
    [finding] = check({"fact": "rises"}, Bench())
    assert finding.verdict is Outcome.ABSENT
    assert "capmoe-eval bench ep --study" in finding.text
    assert verdict("s51-accelerates", Bench()) == "not measured"
    assert verdict("s51-faster-tighter", Bench()) == "confirmed in print"
