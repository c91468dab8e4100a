"""The command ``claims``: write every claim of the paper with its verdict."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from capmoe_eval.errors import UsageError, bad_choice, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import Parser, report_options
from capmoe_eval.experiment.composition import check_once, options
from capmoe_eval.experiment.files import check_writable, write_text
from capmoe_eval.experiment.results import (
    LOCAL,
    Reader,
    read_results,
    record_places,
)
from capmoe_eval.experiment.timings.names import FOLDER
from capmoe_eval.paper.benchmarks import read_bench
from capmoe_eval.paper.claims.ledger import ledger, paper_claims
from capmoe_eval.paper.evidence import Evidence, pooled_models
from capmoe_eval.paper.trainings import dev_losses, read_trainings
from capmoe_eval.report.claims.render import RENDERERS, Report

_KEYS = ("profile", "results_dir")


def main(arguments: Sequence[str] | None = None, reader: Reader | None = None) -> None:
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
        report = build(results, profile, folder, parsed.bench, reader)
        if not report.evidence.records and ("results_dir" in settings or record_places(results)):
            raise UsageError(
                f"results_dir={results}: no whole record there; name one that has records"
            )
        for line in report.evidence.broken:
            print(f"left out: {line}", file=sys.stderr)
        with writing("--out", parsed.out):
            for suffix, renderer in RENDERERS.items():
                write_text(folder / f"claims.{suffix}", renderer(report))
        n_claims, n_records = sum(report.counts.values()), len(report.evidence.records)
        print(f"{n_claims} claims judged by {n_records} records of profile {profile}")
        for heading, count in report.headings:
            print(f"{count:4} {heading}")
        print("written: " + ", ".join(str(folder / f"claims.{suffix}") for suffix in RENDERERS))
        return 0

    sys.exit(run_command(write))


def build(
    results: Path,
    profile: str,
    folder: Path,
    bench: Path = FOLDER,
    reader: Reader | None = None,
) -> Report:
    """Return the ledger of a results directory, with links as seen from ``folder``."""
    results_read, timed = read_results(results, reader), read_bench(bench)
    pooled = pooled_models(profile)
    evidence = Evidence(
        profile,
        results_read.records,
        (*results_read.broken, *timed.broken),
        trainings=read_trainings(None, profile),
        bench=timed,
        pooled=pooled,
        losses=dev_losses(pooled),
    )
    return Report(ledger(paper_claims(), evidence), evidence, folder)


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
