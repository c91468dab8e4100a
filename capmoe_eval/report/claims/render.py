"""The ledger as Markdown, HTML and JSON: the same verdicts, the same bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from capmoe_eval.paper.claims.evidence import Evidence
from capmoe_eval.paper.claims.finding import Detail, Finding, Verdict
from capmoe_eval.paper.verdicts import (
    CONFIRMED,
    CONTRADICTED,
    INCONSISTENT,
    NOT_MEASURED,
    NOT_SHOWN,
    NOT_TESTABLE,
    WORDS,
)
from capmoe_eval.report.templates import render

_TITLE: Final = "Claims of “Capacity-Aware Inference”, one by one"
_MEANING: Final = {
    CONFIRMED: "what was measured, or the arithmetic of the printed numbers, bears it out",
    CONTRADICTED: "what was measured says the opposite",
    NOT_SHOWN: "measured or computed, but it decides nothing",
    INCONSISTENT: "the paper's own numbers or places disagree",
    NOT_MEASURED: "it can be measured here; the records are not there",
    NOT_TESTABLE: "it needs hardware, weights or data that this suite has not, or is a definition",
}
_SCOPE_NOTE: Final = {
    "zoo": (
        "Measured verdicts are at toy scale: they speak of small models trained on a closed "
        "mini-world, never of the paper's checkpoints."
    ),
    "tiny": "Measured verdicts are of untrained models, whose answers are guesses.",
    "paper": "Measured verdicts are of the paper's checkpoints.",
}
_SOURCES: Final = {
    "printed": "in print",
    "agree": "in print",
    "measured": "measured",
    "load": "load",
    "promise": "promise",
    "value": "value",
    "replication": "replication",
    "speedup": "expert parallelism",
    "none": "not tested",
}
_LINKS: Final = 3
_PUBLIC: Final = ("id", "version", "section", "place", "quote", "kind", "published", "note")


@dataclass(frozen=True)
class Report:
    """What a ledger shows.

    Attributes:
        verdicts: In the order of the paper.
        evidence: What they were judged by.
        base: Directory that links to records are relative to: that of the report.
    """

    verdicts: Sequence[Verdict]
    evidence: Evidence
    base: Path = field(default_factory=Path)

    @property
    def sections(self) -> dict[str, list[Verdict]]:
        """The verdicts by section, in the order of first appearance."""
        sections: dict[str, list[Verdict]] = {}
        for verdict in self.verdicts:
            sections.setdefault(verdict.entry.section, []).append(verdict)
        return sections

    @property
    def counts(self) -> dict[str, int]:
        """How many claims have each verdict; those without a claim are there with 0."""
        words = [verdict.word for verdict in self.verdicts]
        return {word: words.count(word) for word in WORDS}

    @property
    def intro(self) -> list[str]:
        """Sentences above the ledger."""
        evidence = self.evidence
        models = ", ".join(evidence.models) or "none"
        return [
            f"{len(self.verdicts)} claims and numbers, from abstract to appendix (v2: ICLR 2026, "
            "v1: arXiv). How verdicts are reached: docs/claims.md.",
            f"Profile {evidence.profile}: {len(evidence.records)} records, {len(evidence.broken)} "
            f"files that could not be read; models: {models}.",
            _SCOPE_NOTE.get(evidence.profile, ""),
        ]

    def link(self, path: str) -> str:
        """Return a record's path as seen from the report, with forward slashes."""
        return Path(os.path.relpath(path, self.base)).as_posix()


def _shown(verdict: Verdict) -> tuple[str, str]:
    """Return the number beside the published one and its 95 % interval, empty where there is none.

    It is the first of what the first finding with numbers has.
    """
    details = next((finding.details for finding in verdict.findings if finding.details), ())
    if not details:
        return "", ""
    first, more = details[0], f" (first of {len(details)})" if details[1:] else ""
    value = f"{first.effect:+.2f}" if first.unit == "points" else f"{first.effect:.3g}"
    bounds = first.low is not None and first.high is not None
    return (
        f"{value} {first.unit}".rstrip() + more,
        f"[{first.low:+.2f}, {first.high:+.2f}]" if bounds else "",
    )


def to_markdown(report: Report) -> str:
    """Return the ledger in GitHub-flavoured Markdown: tables by section, then what was found."""
    lines = [f"# {_TITLE}", "", *_paragraphs(report.intro)]
    lines += ["| Verdict | Claims | Meaning |", "|:--|--:|:--|"]
    lines += [f"| {w} | {n} | {_md(_MEANING[w])} |" for w, n in report.counts.items()]
    for section, verdicts in report.sections.items():
        lines += ["", f"## {_md(section)}", ""]
        lines += ["| Place | Claim | Published | Ours | 95 % interval | Verdict |"]
        lines += ["|:--|:--|:--|--:|:--|:--|"]
        lines += [_markdown_row(verdict) for verdict in verdicts]
    lines += ["", "# What was found", ""]
    for verdict in report.verdicts:
        entry = verdict.entry
        lines += [
            f'<a id="{_id(entry.id)}"></a>',
            f"**{_md(entry.place)}** ({entry.version}), {entry.kind}: “{_md(entry.quote)}” — "
            f"*{verdict.label}*",
            "",
        ]
        lines += [f"- {_markdown_finding(finding, report)}" for finding in verdict.findings]
        lines += [f"- note: {_md(entry.note)}"] if entry.note else []
        lines += [""]
    if report.evidence.broken:
        lines += ["# Files that could not be read", ""]
        lines += [f"- {_md(line)}" for line in report.evidence.broken] + [""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _paragraphs(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        if text:
            yield _md(text)
            yield ""


def _markdown_row(verdict: Verdict) -> str:
    entry = verdict.entry
    cells = [
        f"{entry.place} ({entry.version})",
        f"“{entry.quote}”",
        str(entry.published or ""),
        *_shown(verdict),
    ]
    label = f"[{verdict.label}](#{_id(entry.id)})"
    return f"| {' | '.join(_md(cell) for cell in cells)} | {label} |"


def _markdown_finding(finding: Finding, report: Report) -> str:
    paths = _records(finding)
    links = [f"[{_md(Path(p).name)}]({_url(report.link(p))})" for p in paths[:_LINKS]]
    if len(paths) > _LINKS:
        links.append(f"and {len(paths) - _LINKS} more in claims.json")
    parts = [f"{_origin(finding)}: {_md(finding.text)}", *map(_md, _models(finding))]
    return " ".join([*parts, *([f"Records: {', '.join(links)}."] if links else [])])


def _by_model(detail: Detail) -> str:
    pattern = "{:+.2f}" if detail.unit == "points" else "{:.3g}"
    return ", ".join(f"{model} {pattern.format(value)}" for model, value in detail.models.items())


def _records(finding: Finding) -> list[str]:
    return list(dict.fromkeys(path for detail in finding.details for path in detail.records))


def to_html(report: Report) -> str:
    """Return the ledger as one page that needs nothing besides: no script, no network."""
    return render(
        "ledger",
        title=_TITLE,
        intro=[text for text in report.intro if text],
        counts=[(word, count, _MEANING[word]) for word, count in report.counts.items()],
        sections={
            section: [_html_claim(verdict, report) for verdict in verdicts]
            for section, verdicts in report.sections.items()
        },
        broken=report.evidence.broken,
    )


def _html_claim(verdict: Verdict, report: Report) -> dict[str, object]:
    entry, (value, bounds) = verdict.entry, _shown(verdict)
    return {
        "id": _id(entry.id),
        "place": entry.place,
        "version": entry.version,
        "quote": entry.quote,
        "findings": [_html_finding(finding, report) for finding in verdict.findings],
        "note": entry.note and f"note: {entry.note}",
        "published": entry.published or "",
        "ours": value,
        "interval": bounds,
        "word": verdict.word,
        "label": verdict.label,
    }


def _html_finding(finding: Finding, report: Report) -> dict[str, object]:
    paths = _records(finding)
    rest = len(paths) - _LINKS
    return {
        "origin": _origin(finding),
        "text": " ".join([finding.text, *_models(finding)]),
        "records": [
            {"href": _url(report.link(path)), "text": Path(path).name} for path in paths[:_LINKS]
        ],
        "more": f" and {rest} more in claims.json." if rest > 0 else ".",
    }


def _origin(finding: Finding) -> str:
    return f"{_SOURCES[finding.source]}, {finding.outcome.value}"


def _models(finding: Finding) -> list[str]:
    """Return a sentence on the models of each detail, where they were measured."""
    if finding.source not in ("measured", "replication"):
        return []
    return [f"{d.label} by model: {_by_model(d)}." for d in finding.details if d.models]


def _url(path: str) -> str:
    return quote(path, safe="/.-_~")


def to_json(report: Report) -> str:
    """Return the ledger as JSON; records are listed once and meant by their position."""
    findings = [finding for verdict in report.verdicts for finding in verdict.findings]
    paths = sorted({path for finding in findings for path in _records(finding)})
    position = {path: index for index, path in enumerate(paths)}

    def claim(verdict: Verdict) -> dict[str, Any]:
        entry = dataclasses.asdict(verdict.entry)
        return {
            **{name: entry[name] for name in _PUBLIC},
            "verdict": verdict.word,
            "scope": verdict.scope,
            "findings": [
                {
                    "source": finding.source,
                    "outcome": finding.outcome.value,
                    "text": finding.text,
                    "details": [detail(item) for item in finding.details],
                }
                for finding in verdict.findings
            ],
        }

    def detail(item: Detail) -> dict[str, Any]:
        return {
            "label": item.label,
            **{name: _round(getattr(item, name)) for name in ("effect", "low", "high", "p")},
            "unit": item.unit,
            "models": {model: _round(value) for model, value in item.models.items()},
            "records": [position[path] for path in item.records],
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
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _round(value: float | None) -> float | None:
    """Return six significant digits: beyond them platforms differ, and nobody reads them."""
    return None if value is None else float(f"{value:.6g}")


RENDERERS: Final = {"md": to_markdown, "html": to_html, "json": to_json}


def _id(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", text)


def _md(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|~])", r"\\\1", " ".join(text.split()))
