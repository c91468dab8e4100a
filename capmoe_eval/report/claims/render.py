"""The ledger as Markdown, HTML and JSON: the same verdicts, the same bytes."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.experiment.packs import file_with
from capmoe_eval.paper.claims.ledger import IN_PRINT, ClaimVerdict, StatedValue
from capmoe_eval.paper.evidence import Evidence
from capmoe_eval.paper.verdicts import WORDS, CheckResult
from capmoe_eval.report.templates import render

_TITLE: Final = "Claims of “Capacity-Aware Inference”, one by one"
_WORDS: Final = read_data(__package__, "words.yaml", dict[str, dict[str, str]])
_LINKS: Final = 3  # records that a finding leads to; the others are counted


class _LedgerPart(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)


class WrittenDetail(_LedgerPart):
    """A number behind a check; ``records`` are positions in the ledger's list of paths."""

    label: str
    effect: float
    low: float | None
    high: float | None
    p: float | None
    unit: str
    outcome: str
    wide: tuple[float, float] | None
    models: dict[str, float]
    records: list[NonNegativeInt]


class WrittenCheck(_LedgerPart):
    """The result of one check of a claim."""

    source: str
    outcome: str
    text: str
    details: list[WrittenDetail]


class LedgerClaim(_LedgerPart):
    """A claim or number of the paper, with its verdict and the label of the detail that decided."""

    id: str
    version: str
    section: str
    place: str
    quote: str
    kind: str
    published: StatedValue | None
    note: str
    verdict: str
    scope: str
    decided_by: str | None
    findings: list[WrittenCheck]


class LedgerFile(_LedgerPart):
    """The file ``claims.json``."""

    profile: str
    models: list[str]
    records: list[str]  # paths as seen from the file
    broken: list[str]
    counts: dict[str, int]
    claims: list[LedgerClaim]


@dataclass(frozen=True)
class Report:
    """The verdicts in the order of the paper, the evidence, and the directory of the report."""

    verdicts: Sequence[ClaimVerdict]
    evidence: Evidence
    base: Path = field(default_factory=Path)

    @property
    def counts(self) -> dict[str, int]:
        """The number of claims with each verdict, 0 included."""
        words = [verdict.word for verdict in self.verdicts]
        return {word: words.count(word) for word in WORDS}

    @property
    def headings(self) -> list[tuple[str, int]]:
        """Each verdict with its number of claims, and how many the printed numbers alone decide."""
        in_print = Counter(v.word for v in self.verdicts if v.scope == IN_PRINT)
        return [
            (_heading(word, count, in_print[word]), count) for word, count in self.counts.items()
        ]

    def link(self, path: str) -> str:
        """Return a record's path as seen from the report, with forward slashes."""
        return Path(os.path.relpath(path, self.base)).as_posix()

    def address(self, path: str) -> str:
        """Return the address of the file that has a record, as seen from the report."""
        return quote(self.link(str(file_with(Path(path)))), safe="/.-_~")


def _heading(word: str, count: int, in_print: int) -> str:
    if not in_print:
        return word
    return f"{word} in print" if in_print == count else f"{word}, {in_print} of them in print"


def to_markdown(report: Report) -> str:
    """Return the ledger in GitHub-flavoured Markdown: tables by section, then what was found."""
    return render("ledger.md", **_content(report))


def to_html(report: Report) -> str:
    """Return the ledger as one page that needs nothing besides: no script, no network."""
    return render("ledger.html", **_content(report))


def profile_note(profile: str) -> str:
    """Return what verdicts on the models of a profile speak of, or nothing."""
    return _WORDS["profiles"].get(profile, "")


def _content(report: Report) -> dict[str, object]:
    evidence = report.evidence
    sections: dict[str, list[dict[str, object]]] = {}
    for verdict in report.verdicts:
        sections.setdefault(verdict.entry.section, []).append(_claim(verdict, report))
    intro = (
        f"{len(report.verdicts)} claims and numbers, from abstract to appendix (v2: ICLR 2026, "
        "v1: arXiv). How verdicts are reached: docs/explanation/verdicts.md.",
        f"Profile {evidence.profile}: {len(evidence.records)} records, {len(evidence.broken)} "
        f"files that could not be read; models: {', '.join(evidence.models) or 'none'}.",
        profile_note(evidence.profile),
    )
    return {
        "title": _TITLE,
        "intro": [text for text in intro if text],
        "counts": [
            (heading, count, meaning)
            for (heading, count), meaning in zip(
                report.headings, _WORDS["verdicts"].values(), strict=True
            )
        ],
        "sections": sections,
        "broken": evidence.broken,
    }


def _claim(verdict: ClaimVerdict, report: Report) -> dict[str, object]:
    entry, finding = verdict.entry, verdict.decided_by
    value = interval = ""
    if finding:
        count = sum(len(result.findings) for result in verdict.results)
        more = f" (one of {count}: {finding.label})" if count > 1 else ""
        effect = f"{finding.effect:+.2f}" if finding.unit == "points" else f"{finding.effect:.3g}"
        value = f"{effect} {finding.unit}".rstrip() + more
        if finding.low is not None and finding.high is not None:
            interval = f"[{finding.low:+.2f}, {finding.high:+.2f}]"
    findings = [_in_words(result, report) for result in verdict.results]
    return {
        "id": re.sub(r"[^A-Za-z0-9-]", "-", entry.id),
        "entry": entry,
        "verdict": verdict,
        "findings": findings,
        "quote": quoted(entry.quote, findings, entry.note and f"note: {entry.note}"),
        "ours": value,
        "interval": interval,
    }


class FindingInWords(NamedTuple):
    """The finding of a check, with links (address, text) to the first records that it rests on."""

    origin: str
    text: str
    links: Sequence[tuple[str, str]]
    more: str  # behind the links

    @classmethod
    def of(
        cls, origin: str, text: str, links: Sequence[tuple[str, str]], rest: str = "", end: str = ""
    ) -> FindingInWords:
        """Return a finding with few of its links, and how many more there are."""
        count = len(links) - _LINKS
        return cls(origin, text, links[:_LINKS], f" and {count} more{rest}" if count > 0 else end)


def _in_words(result: CheckResult, report: Report) -> FindingInWords:
    texts = [result.text]
    if result.source == "measured":
        for finding in result.findings:
            models = ", ".join(f"{model} {points:+.2f}" for model, points in finding.models.items())
            texts.append(f"{finding.label} by model: {models}.")
    origin = f"{_WORDS['checks'].get(result.source, result.source)}, {result.outcome.value}"
    paths = dict.fromkeys(path for finding in result.findings for path in finding.records)
    links = [(report.address(path), Path(path).name) for path in paths]
    return FindingInWords.of(origin, " ".join(texts), links, " in claims.json.", ".")


def quoted(words: str, findings: Sequence[FindingInWords], note: str) -> Markup:
    """Return the HTML of the paper's words, with what was found folded below them."""
    items = []
    for finding in findings:
        links = [Markup('<a href="{}">{}</a>').format(*link) for link in finding.links]
        records = Markup(" Records: ") + Markup(", ").join(links) + finding.more if links else ""
        item = Markup("<li><strong>{}</strong>: {}{}</li>")
        items.append(item.format(finding.origin, finding.text, records))
    if note:
        items.append(Markup("<li>{}</li>").format(note))
    details = Markup("<details><summary>what was found</summary><ul>{}</ul></details>")
    return Markup("“{}”{}").format(words, details.format(Markup("").join(items)) if items else "")


def to_json(report: Report) -> str:
    """Return the ledger as JSON; records are listed once and referred to by their position."""
    findings = [f for v in report.verdicts for result in v.results for f in result.findings]
    paths = sorted({path for finding in findings for path in finding.records})
    position = {path: index for index, path in enumerate(paths)}

    def written(result: CheckResult) -> WrittenCheck:
        details = [
            WrittenDetail.model_validate(
                {name: getattr(finding, name, None) for name in WrittenDetail.model_fields}
                | {"outcome": finding.outcome.value}
                | {"records": [position[path] for path in finding.records]}
            )
            for finding in result.findings
        ]
        outcome = result.outcome.value
        return WrittenCheck(
            source=result.source, outcome=outcome, text=result.text, details=details
        )

    file = LedgerFile(
        profile=report.evidence.profile,
        models=list(report.evidence.models),
        records=[report.link(path) for path in paths],
        broken=list(report.evidence.broken),
        counts=report.counts,
        claims=[
            LedgerClaim(
                **verdict.entry.model_dump(exclude={"checks"}),
                verdict=verdict.word,
                scope=verdict.scope,
                decided_by=verdict.decided_by.label if verdict.decided_by else None,
                findings=[written(result) for result in verdict.results],
            )
            for verdict in report.verdicts
        ],
    )
    # Six significant digits: beyond them platforms differ, and nobody reads them.
    text = json.dumps({"schema": 1, **file.model_dump()}, allow_nan=False)
    rounded = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}"))
    return json.dumps(rounded, indent=1, ensure_ascii=False) + "\n"


RENDERERS: Final = {"md": to_markdown, "html": to_html, "json": to_json}
