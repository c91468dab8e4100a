"""The ledger from the frame of verdicts: a page, and the same as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.experiment.packs import file_with

from capmoe_report.evidence import Evidence
from capmoe_report.judge import IN_PRINT, Claim, findings_of, of_claims
from capmoe_report.records import seen_from
from capmoe_report.templates import render

if TYPE_CHECKING:
    import pandas as pd

_TITLE: Final = "Claims of “Capacity-Aware Inference”, one by one"
_WORDS: Final = read_data(__package__, "data/words.yaml", dict[str, dict[str, str]])
_LINKS: Final = 3  # records that a finding leads to; the others are counted


def counts(verdicts: pd.DataFrame) -> Mapping[str, int]:
    """Return the number of claims with each verdict, 0 included."""
    words = [*verdicts.drop_duplicates("claim")["conclusion"]]
    return {word: words.count(word) for word in _WORDS["verdicts"]}


def headings(verdicts: pd.DataFrame) -> list[tuple[str, int]]:
    """Return each verdict with its number of claims, and how many of them are in print alone."""
    in_print = counts(verdicts[verdicts["of"] == IN_PRINT])
    rows = []
    for word, count in counts(verdicts).items():
        part = in_print[word]
        text = f"{word} in print" if part == count else f"{word}, {part} of them in print"
        rows.append((text if part else word, count))
    return rows


def profile_note(profile: str) -> str:
    """Return what verdicts on the models of a profile speak of, or nothing."""
    return _WORDS["profiles"].get(profile, "")


def to_html(
    verdicts: pd.DataFrame, claims: Sequence[Claim], evidence: Evidence, folder: Path
) -> str:
    """Return the ledger as one page that needs nothing besides: no script, no network.

    Args:
        verdicts: Those on the claims.
        claims: In the order of the paper.
        evidence: What they were judged by.
        folder: Where the page is written, from which its links lead to records.
    """
    sections: dict[str, list[Mapping[str, object]]] = {}
    for claim, rows in of_claims(verdicts, claims):
        sections.setdefault(claim.section, []).append(_in_words(claim, rows, folder))
    n_cells, broken = len(evidence.results.cells), evidence.broken
    intro = (
        f"{len(claims)} claims and numbers, from abstract to appendix (v2: ICLR 2026, "
        "v1: arXiv). How verdicts are reached: docs/explanation/verdicts.md.",
        f"Profile {evidence.profile}: {n_cells} records, {len(broken)} "
        f"files that could not be read; models: {', '.join(evidence.models) or 'none'}.",
        profile_note(evidence.profile),
    )
    meanings = zip(headings(verdicts), _WORDS["verdicts"].values(), strict=True)
    return render(
        "ledger.html",
        title=_TITLE,
        intro=list(filter(None, intro)),
        counts=[(word, count, meaning) for (word, count), meaning in meanings],
        sections=sections,
        broken=broken,
    )


def _in_words(claim: Claim, rows: pd.DataFrame, folder: Path) -> Mapping[str, object]:
    """Return a claim, its verdict, our number with its interval, and what was found."""
    value = interval = ""
    for decided in findings_of(rows[rows["decides"]]):
        count = rows["effect"].notna().sum()
        more = f" (one of {count}: {decided.label})" if count > 1 else ""
        pattern = "{:+.2f}" if decided.unit == "points" else "{:.3g}"
        value = f"{pattern.format(decided.effect)} {decided.unit}".rstrip() + more
        if decided.low is not None:
            interval = f"[{decided.low:+.2f}, {decided.high:+.2f}]"
    first = rows.iloc[0]
    return {
        "id": re.sub(r"[^A-Za-z0-9-]", "-", claim.id),
        "claim": claim,
        "verdict": first["conclusion"],
        "label": f"{first['conclusion']} {first['of']}".strip(),
        "findings": list(_checks(rows, folder)),
        "ours": value,
        "interval": interval,
    }


def _checks(rows: pd.DataFrame, folder: Path) -> Iterator[Mapping[str, object]]:
    """Yield origin and text of each check, links to its first records, and how many more."""
    for _, of_check in rows.groupby((rows["label"] == "").cumsum()):
        check, *findings = findings_of(of_check)
        kind = str(of_check["check"].iloc[0])
        texts = [check.text]
        paths: dict[str, None] = {}
        for finding in findings:
            paths |= dict.fromkeys(finding.records)
            if kind == "measured" and finding.models:
                models = ", ".join(f"{name} {x:+.2f}" for name, x in finding.models.items())
                texts.append(f"{finding.label} by model: {models}.")
        links = [
            (quote(seen_from(folder, file_with(Path(path)))), Path(path).name)
            for path in [*paths][:_LINKS]
        ]
        more = f" and {len(paths) - _LINKS} more in claims.json" if len(paths) > _LINKS else ""
        origin = f"{_WORDS['checks'].get(kind, kind)}, {check.verdict}"
        yield {"origin": origin, "text": " ".join(texts), "links": links, "more": more}


def to_json(
    verdicts: pd.DataFrame, claims: Sequence[Claim], evidence: Evidence, folder: Path
) -> str:
    """Return the ledger as JSON; records are listed once and referred to by their position."""
    paths = sorted({path for of_row in verdicts["records"] for path in of_row})
    position = {path: index for index, path in enumerate(paths)}
    written = []
    for claim, rows in of_claims(verdicts, claims):
        first = rows.iloc[0]
        findings: list[dict[str, Any]] = []
        for check, finding in zip(rows["check"], findings_of(rows), strict=True):
            dumped = finding.model_dump(mode="json", exclude_defaults=True)
            records = [position[path] for path in finding.records]
            rest = {"text": finding.text, "scope": finding.scope, "records": records}
            findings.append({"check": check, **dumped, **{k: v for k, v in rest.items() if v}})
        about = {"verdict": first["conclusion"], "scope": first["of"], "findings": findings}
        fields = claim.model_dump(mode="json", exclude={"checks", "statement", "refuted_by"})
        decided = rows["label"][rows["decides"]]
        written.append(fields | about | {"decided_by": next(iter(decided), None)})
    content = {
        "schema": 2,
        "profile": evidence.profile,
        "models": evidence.models,
        "records": [seen_from(folder, path) for path in paths],
        "broken": evidence.broken,
        "counts": counts(verdicts),
        "claims": written,
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
