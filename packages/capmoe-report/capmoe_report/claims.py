"""The command ``claims``: write every claim of the paper with its verdict, the ledger."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from capmoe_bench.timings import read_bench
from capmoe_eval.errors import UsageError, bad_choice, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import Parser, report_options
from capmoe_eval.experiment.composition import composed
from capmoe_eval.experiment.configuration import profile_name
from capmoe_eval.experiment.files import check_writable, read_data, write_text
from capmoe_eval.experiment.packs import file_with
from capmoe_eval.experiment.results import LOCAL, read_results, record_places

from capmoe_report.evidence import Evidence, evidence_of
from capmoe_report.judge import IN_PRINT, Claim, judge, paper_claims
from capmoe_report.records import seen_from
from capmoe_report.templates import render
from capmoe_report.verdicts import JudgedClaim

_KEYS: Final = ("profile", "results_dir")
_WORDS: Final = read_data(__package__, "data/words.yaml", dict[str, dict[str, str]])
_LINKS: Final = 3  # records that a finding leads to; the others are counted


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
        for word in parsed.overrides:
            if (key := word.partition("=")[0]) not in _KEYS:
                raise bad_choice("key", key, _KEYS)
        config = composed(parsed.overrides)
        profile, results = profile_name(config), Path(config.results_dir)
        is_named = any(word.startswith("results_dir=") for word in parsed.overrides)
        if is_named and not results.is_dir():
            raise UsageError(f"results_dir={results}: no such directory; name one that has records")
        check_writable("--out", parsed.out)
        folder, broken, bench = parsed.out / profile, list[str](), read_bench(parsed.bench)
        records = read_results(results, broken)
        broken += bench.broken
        evidence = evidence_of(profile, records, bench=bench, broken=tuple(broken))
        n_cells = len(evidence.results.cells)
        if not n_cells and (is_named or record_places(results)):
            raise UsageError(
                f"results_dir={results}: no whole record there; name one that has records"
            )
        for line in broken:
            print(f"left out: {line}", file=sys.stderr)
        claims = paper_claims()
        judged = judge(evidence, claims)
        files = {"claims.html": to_html, "claims.json": to_json}
        with writing("--out", parsed.out):
            for name, written in files.items():
                write_text(folder / name, written(claims, judged, evidence, folder))
        print(f"{len(claims)} claims judged by {n_cells} records of profile {profile}")
        for heading, count in headings(judged):
            print(f"{count:4} {heading}")
        print("written: " + ", ".join(str(folder / name) for name in files))
        return 0

    sys.exit(run_command(write))


def counts(judged: Sequence[JudgedClaim]) -> dict[str, int]:
    """Return the number of claims with each verdict, 0 included."""
    words = Counter(claim.verdict for claim in judged)
    return {word: words[word] for word in _WORDS["verdicts"]}


def headings(judged: Sequence[JudgedClaim]) -> list[tuple[str, int]]:
    """Return each verdict with its number of claims, and how many of them are in print alone."""
    in_print = counts([claim for claim in judged if claim.scope == IN_PRINT])
    rows = []
    for word, count in counts(judged).items():
        part = in_print[word]
        text = f"{word} in print" if part == count else f"{word}, {part} of them in print"
        rows.append((text if part else word, count))
    return rows


def profile_note(profile: str) -> str:
    """Return what verdicts on the models of a profile speak of, or nothing."""
    return _WORDS["profiles"].get(profile, "")


def to_html(
    claims: Sequence[Claim], judged: Sequence[JudgedClaim], evidence: Evidence, folder: Path
) -> str:
    """Return the ledger as one page that needs nothing besides: no script, no network.

    Args:
        claims: In the order of the paper.
        judged: The verdicts on them.
        evidence: What they were judged by.
        folder: Where the page is written, from which its links lead to records.
    """
    sections: dict[str, list[Mapping[str, object]]] = {}
    for claim, verdict in zip(claims, judged, strict=True):
        written = {
            "claim": claim,
            "id": re.sub(r"[^A-Za-z0-9-]", "-", claim.id),
            "judged": verdict,
            "measured": [row for row in verdict.contrasts if row.effect is not None],
            "checks": list(_checks(verdict, folder)),
        }
        sections.setdefault(claim.section, []).append(written)
    n_cells, broken = len(evidence.results.cells), evidence.broken
    intro = (
        f"{len(claims)} claims and numbers, from abstract to appendix (v2: ICLR 2026, "
        "v1: arXiv). How verdicts are reached: docs/explanation/verdicts.md.",
        f"Profile {evidence.profile}: {n_cells} records, {len(broken)} "
        f"files that could not be read; models: {', '.join(evidence.models) or 'none'}.",
        profile_note(evidence.profile),
    )
    words = zip(_WORDS["verdicts"].items(), headings(judged), strict=True)
    return render(
        "ledger.html",
        intro=list(filter(None, intro)),
        counts=[(word, text, count, meaning) for (word, meaning), (text, count) in words],
        sections=sections,
        broken=broken,
    )


def _checks(judged: JudgedClaim, folder: Path) -> Iterator[Mapping[str, object]]:
    """Yield origin, text and findings of each check, links to its first records, and their rest."""
    for kind, (check, *findings) in judged.checks:
        paths = [*dict.fromkeys(path for finding in findings for path in finding.records)]
        yield {
            "origin": f"{_WORDS['checks'].get(kind, kind)}, {check.verdict}",
            "text": check.text,
            "findings": findings,
            "links": [
                (quote(seen_from(folder, file_with(Path(path)))), Path(path).name)
                for path in paths[:_LINKS]
            ],
            "more": max(0, len(paths) - _LINKS),
        }


def to_json(
    claims: Sequence[Claim], judged: Sequence[JudgedClaim], evidence: Evidence, folder: Path
) -> str:
    """Return the ledger as JSON; records are listed once and referred to by their position."""
    of_claims = [
        [(kind, finding) for kind, findings in verdict.checks for finding in findings]
        for verdict in judged
    ]
    paths = sorted({path for rows in of_claims for _, row in rows for path in row.records})
    position = {path: index for index, path in enumerate(paths)}
    written = []
    for claim, verdict, rows in zip(claims, judged, of_claims, strict=True):
        findings: list[dict[str, Any]] = []
        for kind, finding in rows:
            dumped = finding.model_dump(mode="json", exclude_defaults=True)
            records = [position[path] for path in finding.records]
            rest = {"text": finding.text, "scope": finding.scope, "records": records}
            findings.append({"check": kind, **dumped, **{k: v for k, v in rest.items() if v}})
        about = {"verdict": verdict.verdict, "scope": verdict.scope, "findings": findings}
        left_out = {"checks", "statement", "refuted_by", "unit"}
        fields = claim.model_dump(mode="json", exclude=left_out)
        stated = {"values": claim.published, "unit": claim.unit} if claim.published else None
        decided_by = {"decided_by": verdict.decided_by or None}
        written.append(fields | {"published": stated} | about | decided_by)
    content = {
        "schema": 2,
        "profile": evidence.profile,
        "models": evidence.models,
        "records": [seen_from(folder, path) for path in paths],
        "broken": evidence.broken,
        "counts": counts(judged),
        "claims": written,
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
