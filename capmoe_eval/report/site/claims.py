"""The page of claims: the verdicts of the replication, and the ledger of the whole paper."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, NonNegativeInt

from capmoe_eval.paper.verdict_file import VerdictFile
from capmoe_eval.report.site.inventory import Inventory, read
from capmoe_eval.report.site.names import Filter, name_filter
from capmoe_eval.report.site.page import Address, Link, render_page
from capmoe_eval.report.templates.texts import ABSENT, shown

LEDGER: Final = "claims.json"
_FORMATS: Final = {suffix: f"claims.{suffix}" for suffix in ("html", "md", "json")}
_LINKS: Final = 3


class Published(BaseModel):
    """A value as the paper states it."""

    values: list[float | str] = []
    unit: str = ""


class Detail(BaseModel):
    """A number behind a finding; ``records`` are positions in the ledger's list of paths."""

    label: str
    effect: float
    low: float | None
    high: float | None
    unit: str
    records: list[NonNegativeInt]


class Finding(BaseModel):
    """The result of one check of a claim."""

    source: str
    outcome: str
    text: str
    details: list[Detail]


class LedgerClaim(BaseModel):
    """A claim or number of the paper, with its verdict and the label of the detail that decided."""

    version: str
    place: str
    quote: str
    kind: str
    published: Published | None
    note: str
    verdict: str
    scope: str
    decided_by: str | None
    findings: list[Finding]


class Ledger(BaseModel):
    """The file of :func:`capmoe_eval.report.claims.render.to_json`, as far as the page shows it."""

    profile: str
    records: list[str]
    claims: list[LedgerClaim]


Verdicts = TypeVar("Verdicts", VerdictFile, Ledger)


def read_verdicts(kind: type[Verdicts], path: Path, profile: str) -> Verdicts | str | None:
    """Return a file of a profile's verdicts, why it cannot be read, or None if there is none."""
    if not path.is_file():
        return None
    found = read(kind, path)
    if not isinstance(found, str) and found.profile != profile:
        return f"{path}: verdicts of profile {found.profile}, not of {profile}"
    return found


def verdict_counts(file: VerdictFile | Ledger) -> Counter[str]:
    """Return how many claims have each verdict, in the order of their first."""
    return Counter(claim.verdict for claim in file.claims)


def claims_page(inventory: Inventory, address: Address) -> str:
    """Return the page of claims."""
    profile, verdicts = inventory.profile, inventory.verdicts()
    path = address.out / profile / LEDGER
    ledger = read_verdicts(Ledger, path, profile)
    return render_page(
        "claims",
        address,
        "Claims",
        profile,
        replication=read_verdicts(VerdictFile, verdicts, profile),
        replication_file=address.link_to_file(verdicts, verdicts.name),
        ledger=_ledger(ledger, path, inventory, address) if isinstance(ledger, Ledger) else ledger,
    )


def _ledger(found: Ledger, path: Path, inventory: Inventory, address: Address) -> dict[str, object]:
    verdicts = {verdict: f"{verdict} ({n})" for verdict, n in verdict_counts(found).items()}
    versions = sorted({claim.version for claim in found.claims}, reverse=True)
    pages = _pages(found, path.parent, inventory, address)
    return {
        "choices": [
            Filter("verdict", "Verdict", verdicts),
            name_filter("kind", "Kind", (claim.kind for claim in found.claims)),
            Filter("version", "Version", {version: version for version in versions}),
        ],
        "claims": [_claim(claim, pages) for claim in found.claims],
        "files": address.files(path.with_suffix(""), _FORMATS),
    }


def _pages(
    found: Ledger, folder: Path, inventory: Inventory, address: Address
) -> list[Link | None]:
    """Return a link to the page of each record that the ledger names."""
    resolved = functools.cache(Path.resolve)  # a directory has many records

    def place(file: Path) -> tuple[Path, str]:
        return resolved(file.parent), file.name

    records = {place(record.path): record for record in inventory.records}
    named = [records.get(place(folder / path)) for path in found.records]
    return [{"href": address.to_record(one), "text": str(one)} if one else None for one in named]


def _claim(claim: LedgerClaim, pages: Sequence[Link | None]) -> dict[str, object]:
    there = claim.published or Published()
    values = [value if isinstance(value, float) else None for value in there.values]
    printed = f"{', '.join(map(shown, values))} {there.unit}".rstrip() or ABSENT
    details = [detail for finding in claim.findings for detail in finding.details]
    ours = next((d for d in details if d.label == claim.decided_by), next(iter(details), None))
    effect = ABSENT
    if ours:
        pattern = "{:+.2f}" if ours.unit == "points" else "{:.3g}"
        effect = f"{shown(ours.effect, pattern)} {ours.unit}".rstrip()
    return {
        "claim": claim,
        "findings": [_finding(finding, pages) for finding in claim.findings],
        "published": printed,
        "published_value": values[0] if values else None,
        "ours": ours,
        "effect": effect,
        "count": len(details),
    }


def _finding(finding: Finding, pages: Sequence[Link | None]) -> dict[str, object]:
    places = dict.fromkeys(place for detail in finding.details for place in detail.records)
    links = [link for place in places if place < len(pages) and (link := pages[place])]
    rest = len(links) - _LINKS
    return {
        "origin": f"{finding.source}, {finding.outcome}",
        "text": finding.text,
        "records": links[:_LINKS],
        "more": f" and {rest} more" if rest > 0 else "",
    }
