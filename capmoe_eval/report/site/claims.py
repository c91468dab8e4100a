"""The page of claims: the verdicts of the replication, and the ledger of the whole paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from capmoe_eval.paper.verdict_file import VerdictFile
from capmoe_eval.report.files import Detail, Finding, Ledger, LedgerClaim, read
from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Inventory, attempt
from capmoe_eval.report.site.names import Filter, name_filter
from capmoe_eval.report.site.page import Address, Link, render_page
from capmoe_eval.report.templates.texts import ABSENT, shown

_LINKS = 3

Verdicts = TypeVar("Verdicts", VerdictFile, Ledger)


def read_verdicts(kind: type[Verdicts], path: Path, profile: str) -> Verdicts | str | None:
    """Return a file of a profile's verdicts, why it cannot be read, or None if there is none."""
    if not path.is_file():
        return None
    found = attempt(lambda: read(kind, path))
    if not isinstance(found, str) and found.profile != profile:
        return f"{path}: verdicts of profile {found.profile}, not of {profile}"
    return found


def verdict_counts(file: VerdictFile | Ledger) -> Counter[str]:
    """Return how many claims have each verdict, in the order of their first."""
    return Counter(claim.verdict for claim in file.claims)


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
    path = ledger_path(address.out, profile)
    ledger = read_verdicts(Ledger, path, profile)
    return render_page(
        "claims",
        address,
        "Claims",
        profile,
        replication=read_verdicts(VerdictFile, replication, profile),
        replication_file=address.link_to_file(replication, replication.name),
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
        "files": [
            address.link_to_file(file, file.name)
            for suffix in ("html", "md", "json")
            if (file := path.with_suffix(f".{suffix}")).is_file()
        ],
    }


def _pages(
    found: Ledger, folder: Path, inventory: Inventory, address: Address
) -> list[Link | None]:
    """Return a link to the page of each record that the ledger names."""
    known = {record.path.resolve(): record for record in inventory.records}
    records = [known.get((folder / path).resolve()) for path in found.records]
    return [
        address.link(page.cell_path(record), str(record.cell)) if record else None
        for record in records
    ]


def _claim(claim: LedgerClaim, pages: Sequence[Link | None]) -> dict[str, object]:
    there = claim.published
    values = [v if isinstance(v, float) else None for v in there.values] if there else []
    printed = f"{', '.join(map(shown, values))} {there.unit}".rstrip() if there else ABSENT
    details = [detail for finding in claim.findings for detail in finding.details]
    deciding = [detail for detail in details if detail.label == claim.decided_by] or details
    return {
        "claim": claim,
        "findings": [_finding(finding, pages) for finding in claim.findings],
        "published": printed,
        "published_value": values[0] if values else None,
        "ours": deciding[0] if deciding else None,
        "effect": _effect(deciding[0]) if deciding else ABSENT,
        "count": len(details),
    }


def _effect(detail: Detail) -> str:
    """Return the effect of a detail with its unit."""
    if detail.unit == "points":
        return shown(detail.effect, "{:+.2f} points")
    return f"{shown(detail.effect, '{:.3g}')} {detail.unit}".rstrip()


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
