"""Claims on speedups: directions alone, said to be emulated, never a published number."""

from pathlib import Path

import pytest
import timing_files as files
from capmoe_bench.timings import Bench, read_bench
from fabricate import label

from capmoe_report.evidence import Evidence
from capmoe_report.judge import judge, paper_claims
from capmoe_report.speedup import check, facts
from capmoe_report.verdicts import Outcome

HOLDS, FAILS, UNDECIDED = Outcome.HOLDS, Outcome.FAILS, Outcome.UNDECIDED


def verdict(name: str, bench: Bench) -> str:
    (claim,) = (claim for claim in paper_claims() if claim.id == name)
    return label(*judge(Evidence("zoo", bench=bench), [claim]))


@pytest.mark.parametrize(
    ("fact", "values", "outcome"),
    [
        # Speedups at two γ, with quartiles 5 % apart; all must lie above 1.
        ("accelerates", (1.06, 1.2), HOLDS),  # 1.06 · 0.95 = 1.007
        ("accelerates", (1.04, 1.2), UNDECIDED),  # 1.04 · 0.95 = 0.988
        ("accelerates", (0.9, 0.95), FAILS),  # 0.95 · 1.05 = 0.9975
        ("accelerates", (0.9, 1.2), UNDECIDED),
        # Seconds at rising peaks, from every one to the next.
        ("slower_when_uneven", (1.0, 1.2), HOLDS),
        ("slower_when_uneven", (1.2, 1.0), FAILS),
        ("slower_when_uneven", (1.0, 1.02), UNDECIDED),
        ("slower_when_uneven", (1.0, 1.2, 1.5), HOLDS),
        ("slower_when_uneven", (1.2, 1.0, 1.5), UNDECIDED),
    ],
)
def test_a_fact_is_read_from_quartiles(
    tmp_path: Path, fact: str, values: tuple[float, ...], outcome: Outcome
) -> None:
    if fact == "accelerates":
        method = files.label("score", 1.0)
        rows = [files.row(method | {"gamma": 1.0 + n}, value) for n, value in enumerate(values)]
        points = [files.point([files.row(), *rows])]
    else:
        points = [
            files.point(
                [files.row(phases={"experts": value})],
                routing={"source": "peak", "peak": 2.0 + number},
            )
            for number, value in enumerate(values)
        ]
    files.write(tmp_path, files.study(facts()[fact]["study"], [files.run(points)]))
    assert check({"fact": fact}, read_bench(tmp_path))[0].verdict is outcome


def test_no_emulation_confirms_or_refutes_a_printed_number(tmp_path: Path) -> None:
    bench = read_bench(files.write_all(tmp_path))
    claims = paper_claims()
    new, old = (judge(Evidence("zoo", bench=of), claims) for of in (bench, Bench()))
    for claim, timed, untimed in zip(claims, new, old, strict=True):
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
    slower = files.point([files.row(), files.row(files.label("score", 1.0), 0.5)])
    files.write(tmp_path, files.study("speedup", [files.run([slower])], kind=kind))
    assert verdict("s51-accelerates", read_bench(tmp_path)) == expected


def test_without_files_the_command_is_told() -> None:
    [finding] = check({"fact": "rises"}, Bench())
    assert finding.verdict is Outcome.ABSENT
    assert "capmoe-eval bench ep --study" in finding.text
    assert verdict("s51-accelerates", Bench()) == "not measured"
    assert verdict("s51-faster-tighter", Bench()) == "confirmed in print"
