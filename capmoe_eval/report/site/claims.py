"""The page of claims: the verdicts of the replication, and the ledger of the whole paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Inventory
from capmoe_eval.report.site.loose import (
    ABSENT,
    mapping,
    number,
    read_object,
    sequence,
    shown,
    text,
)
from capmoe_eval.report.site.page import Address, Filter, Frame, Link
from capmoe_eval.report.templates import render

_LINKS = 3


@dataclass(frozen=True)
class Judged:
    """A file of verdicts.

    Attributes:
        path: Where it lies, or would.
        content: What it says; empty without it.
        problem: Why it cannot be read, or nothing.
    """

    path: Path
    content: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def claims(self) -> list[Mapping[str, Any]]:
        """Its claims."""
        return [mapping(claim) for claim in sequence(self.content.get("claims"))]

    @property
    def counts(self) -> dict[str, int]:
        """How many claims have each verdict, in the order of their first."""
        return dict(Counter(text(claim.get("verdict")) for claim in self.claims))


def read_verdicts(path: Path, profile: str) -> Judged | None:
    """Read a file of a profile's verdicts, or return None if there is none."""
    if not path.is_file():
        return None
    try:
        content = read_object(path)
    except ValueError as error:
        return Judged(path, problem=str(error))
    if content.get("profile") != profile:
        of = text(content.get("profile"))
        return Judged(path, problem=f"{path}: verdicts of profile {of}, not of {profile}")
    return Judged(path, content)


def ledger_path(out: Path, profile: str) -> Path:
    """Return where the ledger of a profile is written."""
    return out / profile / "claims.json"


def claims_page(inventory: Inventory, replication: Path, address: Address) -> str:
    """Return the page of claims.

    Args:
        inventory: What is there.
        replication: The JSON file that the replication writes.
        address: Where the page will be.
    """
    profile = inventory.profile
    tested = read_verdicts(replication, profile)
    ledger = read_verdicts(ledger_path(address.out, profile), profile)
    return render(
        "claims",
        frame=Frame(address, "Claims", profile),
        replication=tested and _replication(tested, address),
        ledger=ledger and _ledger(ledger, inventory, address),
    )


def _replication(found: Judged, address: Address) -> dict[str, object]:
    if found.problem:
        return {"problem": found.problem}
    about = found.content
    measured = ", ".join(text(model) for model in sequence(about.get("models")))
    return {
        "problem": "",
        "about": f"Profile {text(about.get('profile'))}, {text(about.get('records'))} evaluations "
        f"of {measured or 'no model'}; effects are points of accuracy, in brackets the 95 % "
        "confidence interval, p corrected within a claim.",
        "missing": about.get("missing") and text(about["missing"]),
        "notes": [text(note) for note in sequence(about.get("notes"))],
        "claims": [_judgement(claim) for claim in found.claims],
        "file": address.link_to_file(found.path, found.path.name),
    }


def _judgement(claim: Mapping[str, Any]) -> dict[str, object]:
    contrasts = [mapping(contrast) for contrast in sequence(claim.get("contrasts"))]
    return {
        **_texts(claim, "verdict", "id", "statement", "place"),
        "contrasts": [_contrast(contrast) for contrast in contrasts],
        "notes": list(dict.fromkeys(text(c.get("note")) for c in contrasts if c.get("note"))),
    }


def _texts(content: Mapping[str, Any], *keys: str) -> dict[str, str]:
    return {key: text(content.get(key)) for key in keys}


def _contrast(contrast: Mapping[str, Any]) -> dict[str, object]:
    effect, low, p = (contrast.get(key) for key in ("effect", "low", "p"))
    models = mapping(contrast.get("models")).items()
    return {
        **_texts(contrast, "label", "verdict"),
        "numbers": [
            (_with_unit(shown(effect, "{:+.2f}"), contrast.get("unit")), number(effect)),
            (_interval(contrast) or ABSENT, number(low)),
            (shown(p, "{:.4f}"), number(p)),
        ],
        "by_model": ", ".join(f"{name} {shown(value, '{:+.2f}')}" for name, value in models),
    }


def _interval(found: Mapping[str, Any]) -> str:
    low, high = number(found.get("low")), number(found.get("high"))
    if low is None or high is None:
        return ""
    return f"[{shown(low, '{:+.2f}')}, {shown(high, '{:+.2f}')}]"


def _ledger(found: Judged, inventory: Inventory, address: Address) -> dict[str, object]:
    if found.problem:
        return {"problem": found.problem}
    claims = found.claims
    verdicts = {verdict: f"{verdict} ({count})" for verdict, count in found.counts.items()}
    kinds = sorted({text(claim.get("kind")) for claim in claims})
    versions = sorted({text(claim.get("version")) for claim in claims}, reverse=True)
    pages = _pages(found, inventory, address)
    return {
        "problem": "",
        "choices": [
            Filter("verdict", "Verdict", verdicts),
            Filter("kind", "Kind", {kind: kind for kind in kinds}),
            Filter("version", "Version", {version: version for version in versions}),
        ],
        "claims": [_claim(claim, pages) for claim in claims],
        "files": [
            address.link_to_file(path, path.name)
            for suffix in ("html", "md", "json")
            if (path := found.path.with_suffix(f".{suffix}")).is_file()
        ],
    }


def _claim(claim: Mapping[str, Any], pages: Sequence[Link | None]) -> dict[str, object]:
    findings = [mapping(finding) for finding in sequence(claim.get("findings"))]
    published = mapping(claim.get("published"))
    values = [number(value) for value in sequence(published.get("values"))]
    printed = ", ".join(shown(value) for value in values) or ABSENT
    if values and published.get("unit"):
        printed += f" {text(published['unit'])}"
    details = [mapping(d) for f in findings for d in sequence(f.get("details"))]
    first = details[0] if details else {}
    pattern = "{:+.2f} points" if first.get("unit") == "points" else "{:.3g}"
    return {
        **_texts(claim, "verdict", "kind", "version", "place", "quote"),
        "findings": [_finding(finding, pages) for finding in findings],
        "note": claim.get("note") and f"Note: {text(claim['note'])}",
        "published": printed,
        "published_value": values[0] if values else None,
        "ours": _with_unit(shown(first.get("effect"), pattern), first.get("unit")),
        "effect": number(first.get("effect")),
        "count": len(details),
        "interval": _interval(first),
        "scope": claim.get("scope") and text(claim["scope"]),
    }


def _with_unit(effect: str, unit: object) -> str:
    """Return an effect with its unit, where there is one and it is not in points."""
    return effect if effect == ABSENT or unit in (None, "", "points") else f"{effect} {text(unit)}"


def _finding(finding: Mapping[str, Any], pages: Sequence[Link | None]) -> dict[str, object]:
    details = [mapping(detail) for detail in sequence(finding.get("details"))]
    places = dict.fromkeys(
        place
        for detail in details
        for place in sequence(detail.get("records"))
        if isinstance(place, int) and 0 <= place < len(pages)
    )
    links = [link for place in places if (link := pages[place]) is not None]
    rest = len(links) - _LINKS
    return {
        "origin": f"{text(finding.get('source'))}, {text(finding.get('outcome'))}",
        "text": text(finding.get("text")),
        "records": links[:_LINKS],
        "more": f" and {rest} more" if rest > 0 else "",
    }


def _pages(found: Judged, inventory: Inventory, address: Address) -> list[Link | None]:
    """Return a link to the page of each record that the ledger names."""
    known = {record.path.resolve(): record for record in inventory.records}
    paths = map(text, sequence(found.content.get("records")))
    records = [known.get((found.path.parent / path).resolve()) for path in paths]
    return [
        address.link(page.cell_path(record), str(record.cell)) if record else None
        for record in records
    ]
