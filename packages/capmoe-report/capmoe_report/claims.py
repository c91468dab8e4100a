"""The command ``claims``: write every claim of the paper with its verdict."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from capmoe_bench.timings import read_bench
from capmoe_eval.errors import UsageError, bad_choice, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import Parser, report_options
from capmoe_eval.experiment.composition import check_once, options
from capmoe_eval.experiment.files import check_writable, write_text
from capmoe_eval.experiment.names import BENCHMARKS
from capmoe_eval.experiment.results import LOCAL, read_results, record_places

from capmoe_report.evidence import Evidence, gather, pooled_models
from capmoe_report.judge import judge, paper_claims
from capmoe_report.ledger import headings, to_html, to_json

_KEYS = ("profile", "results_dir")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the ledger and exit: 0 written, 2 bad input."""
    parser = Parser(
        prog="capmoe-eval claims",
        description="List every claim and number of the paper with its verdict, from finished "
        "results and from the paper's own numbers.",
    )
    report_options(
        parser,
        "profile=zoo (the default), tiny or paper; results_dir=DIR (default: "
        f"results/{LOCAL}PROFILE)",
    )
    parsed = parser.parse_args(arguments)

    def write() -> int:
        settings = _settings(parsed.overrides)
        profile = settings.get("profile", "zoo")
        profiles = options("profile")
        if profile not in profiles:
            raise bad_choice("profile", profile, profiles)
        results = Path(settings.get("results_dir", f"results/{LOCAL}{profile}"))
        if not results.is_dir() and "results_dir" in settings:
            raise UsageError(f"results_dir={results}: no such directory; name one that has records")
        check_writable("--out", parsed.out)
        folder = parsed.out / profile
        evidence = evidence_of(results, profile, parsed.bench)
        n_cells = len(evidence.results.cells)
        if not n_cells and ("results_dir" in settings or record_places(results)):
            raise UsageError(
                f"results_dir={results}: no whole record there; name one that has records"
            )
        for line in evidence.broken:
            print(f"left out: {line}", file=sys.stderr)
        claims = paper_claims()
        verdicts = judge(evidence, claims)
        files = {"claims.html": to_html, "claims.json": to_json}
        with writing("--out", parsed.out):
            for name, written in files.items():
                write_text(folder / name, written(verdicts, claims, evidence, folder))
        print(f"{len(claims)} claims judged by {n_cells} records of profile {profile}")
        for heading, count in headings(verdicts):
            print(f"{count:4} {heading}")
        print("written: " + ", ".join(str(folder / name) for name in files))
        return 0

    sys.exit(run_command(write))


def evidence_of(results: Path, profile: str, bench: Path = BENCHMARKS) -> Evidence:
    """Return what the claims are judged by: the records of a directory, timings and trainings."""
    broken: list[str] = []
    records, models = read_results(results, broken), pooled_models(profile)
    return gather(profile, records, models, bench=read_bench(bench), broken=broken)


def _settings(overrides: Sequence[str]) -> Mapping[str, str]:
    settings = {}
    check_once(overrides)
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UsageError(f"{word}: expected KEY=VALUE, such as profile=zoo")
        if key not in _KEYS:
            raise bad_choice("key", key, _KEYS)
        settings[key] = value
    return settings
