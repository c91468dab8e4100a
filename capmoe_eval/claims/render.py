"""The ledger as Markdown, HTML and JSON: the same verdicts, the same bytes."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from capmoe_eval.claims.evidence import Evidence
from capmoe_eval.claims.finding import Detail, Finding, Verdict
from capmoe_eval.paper.verdicts import (
    CONFIRMED,
    CONTRADICTED,
    INCONSISTENT,
    NOT_MEASURED,
    NOT_SHOWN,
    NOT_TESTABLE,
    WORDS,
)

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
    text = f"{_SOURCES[finding.source]}, {finding.outcome.value}: {_md(finding.text)}"
    models = [
        f"{_md(detail.label)} by model: " + _md(_by_model(detail))
        for detail in finding.details
        if detail.models and finding.source in ("measured", "replication")
    ]
    paths = _records(finding)
    links = [f"[{_md(Path(p).name)}]({_url(report.link(p))})" for p in paths[:_LINKS]]
    if len(paths) > _LINKS:
        links.append(f"and {len(paths) - _LINKS} more in claims.json")
    return " ".join(
        [text, *(f"{m}." for m in models), *([f"Records: {', '.join(links)}."] if links else [])]
    )


def _by_model(detail: Detail) -> str:
    pattern = "{:+.2f}" if detail.unit == "points" else "{:.3g}"
    return ", ".join(f"{model} {pattern.format(value)}" for model, value in detail.models.items())


def _records(finding: Finding) -> list[str]:
    return list(dict.fromkeys(path for detail in finding.details for path in detail.records))


def to_html(report: Report) -> str:
    """Return the ledger as one page that needs nothing besides: no script, no network."""
    body = "\n".join(
        [
            f"<h1>{html.escape(_TITLE)}</h1>",
            *(f"<p>{html.escape(text)}</p>" for text in report.intro if text),
            html_body(report),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(_TITLE)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def html_body(report: Report) -> str:
    """Return the ledger's tables for any page that has :data:`STYLE`; every text is escaped."""
    lines = ['<table class="verdicts"><caption>Verdicts</caption><tbody>']
    lines += [
        f'<tr><th scope="row">{_badge(word, word)}</th><td>{count}</td>'
        f"<td>{html.escape(_MEANING[word])}</td></tr>"
        for word, count in report.counts.items()
    ]
    lines += ["</tbody></table>"]
    for section, verdicts in report.sections.items():
        lines += [f"<h2>{html.escape(section)}</h2>", '<div class="wide"><table class="claims">']
        heads = ("Place", "Claim", "Published", "Ours", "95 % interval", "Verdict")
        cells = "".join(f'<th scope="col">{head}</th>' for head in heads)
        lines += [f"<thead><tr>{cells}</tr></thead>", "<tbody>"]
        lines += [_html_row(verdict, report) for verdict in verdicts]
        lines += ["</tbody></table></div>"]
    if report.evidence.broken:
        lines += ["<h2>Files that could not be read</h2>", "<ul>"]
        lines += [f"<li>{html.escape(line)}</li>" for line in report.evidence.broken]
        lines += ["</ul>"]
    return "\n".join(lines)


def _html_row(verdict: Verdict, report: Report) -> str:
    entry, (value, bounds) = verdict.entry, _shown(verdict)
    found = "".join(f"<li>{_html_finding(f, report)}</li>" for f in verdict.findings)
    note = f"<li>note: {html.escape(entry.note)}</li>" if entry.note else ""
    return (
        f'<tr id="{_id(entry.id)}"><td>{html.escape(entry.place)} ({entry.version})</td>'
        f"<td>“{html.escape(entry.quote)}”<details><summary>what was found</summary>"
        f"<ul>{found}{note}</ul></details></td>"
        f"<td>{html.escape(str(entry.published or ''))}</td>"
        f"<td>{html.escape(value)}</td>"
        f"<td>{html.escape(bounds)}</td>"
        f"<td>{_badge(verdict.word, verdict.label)}</td></tr>"
    )


def _html_finding(finding: Finding, report: Report) -> str:
    parts = [
        f"<strong>{_SOURCES[finding.source]}, {finding.outcome.value}</strong>: "
        f"{html.escape(finding.text)}"
    ]
    if finding.source in ("measured", "replication"):
        parts += [
            f"{html.escape(detail.label)} by model: {html.escape(_by_model(detail))}."
            for detail in finding.details
            if detail.models
        ]
    paths = _records(finding)
    if paths:
        links = ", ".join(
            f'<a href="{html.escape(_url(report.link(p)))}">{html.escape(Path(p).name)}</a>'
            for p in paths[:_LINKS]
        )
        rest = len(paths) - _LINKS
        parts.append(
            f"Records: {links}" + (f" and {rest} more in claims.json." if rest > 0 else ".")
        )
    return " ".join(parts)


def _badge(word: str, label: str) -> str:
    kind = word.replace(" ", "-")
    return f'<span class="verdict {kind}">{html.escape(label)}</span>'


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


STYLE: Final = """\
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --line: #c9c9c9;
  --soft: #f3f3f3; --good: #1d5f3a; --bad: #9b1c1c; --print: #8a4b00; --open: #4a4a4a;
  --link: #1f4e79; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181a; --line: #45494d;
  --soft: #22262a; --good: #7fd3a2; --bad: #ff9a9a; --print: #f2b866; --open: #b9bec3;
  --link: #8fc1ef; } }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem; }
a { color: var(--link); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
caption { text-align: left; font-weight: 600; }
th, td { border-bottom: 1px solid var(--line); padding: 0.35rem 0.6rem; text-align: left;
  vertical-align: top; }
thead th { background: var(--soft); }
table.claims { width: 100%; }
table.claims td:nth-child(2) { min-width: 22rem; }
table.claims td:nth-child(4), table.claims td:nth-child(5) { white-space: nowrap; }
tr:target { outline: 2px solid var(--link); }
summary { cursor: pointer; color: var(--link); }
details ul { margin: 0.3rem 0; padding-left: 1.2rem; }
.verdict { font-weight: 600; color: var(--open); }
.verdict.confirmed { color: var(--good); }
.verdict.contradicted { color: var(--bad); }
.verdict.inconsistent-in-print { color: var(--print); }
@media print { details > ul { display: block; } body { font-size: 10pt; } }
"""
"""Style sheet of the page: light and dark, no colour that is not also a word."""
