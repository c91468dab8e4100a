"""The ledger as Markdown, HTML and JSON: the same verdicts, the same bytes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.paper.claims.ledger import Verdict
from capmoe_eval.paper.claims.result import CheckResult
from capmoe_eval.paper.evidence import Evidence
from capmoe_eval.paper.verdicts import WORDS
from capmoe_eval.report.templates import render

_TITLE: Final = "Claims of “Capacity-Aware Inference”, one by one"
_WORDS: Final = read_data(__package__, "words.yaml", dict[str, dict[str, str]])
_LINKS: Final = 3
_NUMBERS: Final = ("label", "effect", "low", "high", "p", "unit")


@dataclass(frozen=True)
class Report:
    """The verdicts in the order of the paper, the evidence, and the directory of the report."""

    verdicts: Sequence[Verdict]
    evidence: Evidence
    base: Path = field(default_factory=Path)

    @property
    def counts(self) -> dict[str, int]:
        """The number of claims with each verdict, 0 included."""
        words = [verdict.word for verdict in self.verdicts]
        return {word: words.count(word) for word in WORDS}

    def link(self, path: str) -> str:
        """Return a record's path as seen from the report, with forward slashes."""
        return Path(os.path.relpath(path, self.base)).as_posix()


def _shown(verdict: Verdict) -> tuple[str, str]:
    """Return the number that decided and its 95 % interval, empty where there is none."""
    found = verdict.decided_by
    if found is None:
        return "", ""
    count = sum(len(result.findings) for result in verdict.results)
    more = f" (one of {count}: {found.label})" if count > 1 else ""
    value = f"{found.effect:+.2f}" if found.unit == "points" else f"{found.effect:.3g}"
    bounds = found.low is not None and found.high is not None
    return (
        f"{value} {found.unit}".rstrip() + more,
        f"[{found.low:+.2f}, {found.high:+.2f}]" if bounds else "",
    )


def to_markdown(report: Report) -> str:
    """Return the ledger in GitHub-flavoured Markdown: tables by section, then what was found."""
    return render("ledger.md", **_content(report))


def to_html(report: Report) -> str:
    """Return the ledger as one page that needs nothing besides: no script, no network."""
    return render("ledger.html", **_content(report))


def _content(report: Report) -> dict[str, object]:
    evidence = report.evidence
    sections: dict[str, list[dict[str, object]]] = {}
    for verdict in report.verdicts:
        sections.setdefault(verdict.entry.section, []).append(_claim(verdict, report))
    intro = (
        f"{len(report.verdicts)} claims and numbers, from abstract to appendix (v2: ICLR 2026, "
        "v1: arXiv). How verdicts are reached: docs/claims.md.",
        f"Profile {evidence.profile}: {len(evidence.records)} records, {len(evidence.broken)} "
        f"files that could not be read; models: {', '.join(evidence.models) or 'none'}.",
        _WORDS["profiles"].get(evidence.profile, ""),
    )
    return {
        "title": _TITLE,
        "intro": [text for text in intro if text],
        "counts": [(word, n, _WORDS["verdicts"][word]) for word, n in report.counts.items()],
        "sections": sections,
        "broken": evidence.broken,
    }


def _claim(verdict: Verdict, report: Report) -> dict[str, object]:
    value, bounds = _shown(verdict)
    return {
        "id": re.sub(r"[^A-Za-z0-9-]", "-", verdict.entry.id),
        "entry": verdict.entry,
        "verdict": verdict,
        "findings": [_result(result, report) for result in verdict.results],
        "ours": value,
        "interval": bounds,
    }


def _result(result: CheckResult, report: Report) -> dict[str, object]:
    paths = _records(result)
    rest = len(paths) - _LINKS
    return {
        "origin": f"{_WORDS['checks'].get(result.source, result.source)}, {result.outcome.value}",
        "text": " ".join([result.text, *_models(result)]),
        "records": [
            {"href": quote(report.link(path), safe="/.-_~"), "text": Path(path).name}
            for path in paths[:_LINKS]
        ],
        "more": f" and {rest} more in claims.json." if rest > 0 else ".",
    }


def _records(result: CheckResult) -> list[str]:
    return list(dict.fromkeys(path for found in result.findings for path in found.records))


def _models(result: CheckResult) -> Iterator[str]:
    """Yield a sentence on the models of each contrast."""
    if result.source == "measured":
        for found in result.findings:
            models = ", ".join(f"{model} {points:+.2f}" for model, points in found.models.items())
            yield f"{found.label} by model: {models}."


def to_json(report: Report) -> str:
    """Return the ledger as JSON; records are listed once and referred to by their position."""
    results = [result for verdict in report.verdicts for result in verdict.results]
    paths = sorted({path for result in results for path in _records(result)})
    position = {path: index for index, path in enumerate(paths)}

    def claim(verdict: Verdict) -> dict[str, Any]:
        return {
            **verdict.entry.model_dump(exclude={"checks"}),
            "verdict": verdict.word,
            "scope": verdict.scope,
            "decided_by": verdict.decided_by and verdict.decided_by.label,
            "findings": [
                {
                    "source": result.source,
                    "outcome": result.outcome.value,
                    "text": result.text,
                    "details": [
                        {name: getattr(found, name) for name in _NUMBERS}
                        | {"outcome": found.outcome.value, "wide": found.wide}
                        | {"models": found.models, "records": [position[r] for r in found.records]}
                        for found in result.findings
                    ],
                }
                for result in verdict.results
            ],
        }

    content = {
        "schema": 1,
        "profile": report.evidence.profile,
        "models": report.evidence.models,
        "records": [report.link(path) for path in paths],
        "broken": report.evidence.broken,
        "counts": report.counts,
        "claims": [claim(verdict) for verdict in report.verdicts],
    }
    # Six significant digits: beyond them platforms differ, and nobody reads them.
    text = json.dumps(content, allow_nan=False)
    rounded = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}"))
    return json.dumps(rounded, indent=1, ensure_ascii=False) + "\n"


RENDERERS: Final = {"md": to_markdown, "html": to_html, "json": to_json}
