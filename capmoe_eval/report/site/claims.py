"""The page of claims: the verdicts of the replication, and the ledger of the whole paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from markupsafe import Markup

from capmoe_eval.paper.verdicts import VerdictFile, WrittenClaim, WrittenFinding
from capmoe_eval.report.claims.render import (
    FindingInWords,
    LedgerClaim,
    LedgerFile,
    WrittenDetail,
    quoted,
)
from capmoe_eval.report.site import page
from capmoe_eval.report.site.blocks import (
    Block,
    DataCell,
    DataRow,
    DataTable,
    Filter,
    Filters,
    Folded,
    Notice,
    Prose,
    Section,
    badge,
    element,
    head,
    joined,
    link,
    number,
)
from capmoe_eval.report.site.inventory import Inventory, read
from capmoe_eval.report.site.page import Address, name_filter
from capmoe_eval.report.site.sources import LEDGER, contrast_links, ledger_links, shown_detail
from capmoe_eval.report.templates import ABSENT, shown

_FORMATS: Final = {suffix: f"claims.{suffix}" for suffix in ("html", "md", "json")}

Verdicts = TypeVar("Verdicts", VerdictFile, LedgerFile)


def read_verdicts(kind: type[Verdicts], path: Path, profile: str) -> Verdicts | str | None:
    """Return a file of a profile's verdicts, why it cannot be read, or None if there is none."""
    if not path.is_file():
        return None
    file = read(kind, path)
    if not isinstance(file, str) and file.profile != profile:
        return f"{path}: verdicts of profile {file.profile}, not of {profile}"
    return file


def verdict_counts(file: LedgerFile) -> Counter[str]:
    """Return how many claims have each verdict, in the order of their first."""
    return Counter(claim.verdict for claim in file.claims)


def claims_page(inventory: Inventory, address: Address) -> str:
    """Return the page of claims."""
    sections = [
        Section("The main claims, tested", [*_replication(inventory, address)]),
        Section("Every claim and number of the paper", [*_ledger(inventory, address)]),
    ]
    return page.render_page(address, "Claims", inventory.profile, sections)


def _replication(inventory: Inventory, address: Address) -> Iterator[Block]:
    path = inventory.verdicts()
    file = read_verdicts(VerdictFile, path, inventory.profile)
    if file is None:
        yield page.unwritten("Not judged yet:", "replicate", inventory.profile)
    elif isinstance(file, str):
        yield Notice(file)
    else:
        yield Prose(
            f"Profile {file.profile}, {file.records} evaluations of "
            f"{', '.join(file.models) or 'no model'}; effects are points of accuracy, in brackets "
            "the 95 % confidence interval, p corrected within a claim."
        )
        if file.missing:
            yield Notice(f"{file.missing} evaluations are missing.")
        yield from map(Prose, file.notes)
        links = contrast_links(inventory, address)
        yield from (judgement(claim, links) for claim in file.claims)
        yield Prose(joined(["From", link(address.to_file(path), path.name)], " "))


def judgement(claim: WrittenClaim, links: Mapping[tuple[str, str, float], str]) -> Folded:
    """Return a claim of the replication with its verdict, and its contrasts.

    An effect leads to its records by its address in ``links``.
    """
    headings = ("Compared", "Effect", "95 % interval", "p", "Verdict", "By model")
    rows = []
    for contrast in claim.contrasts:
        effect = shown(contrast.effect, "{:+.2f}")
        if contrast.unit != "points" and contrast.effect is not None:
            effect = f"{effect} {contrast.unit}".rstrip()
        if href := links.get((claim.id, contrast.label, contrast.effect or 0.0)):
            effect = link(href, effect)
        models = [f"{name} {shown(value, '{:+.2f}')}" for name, value in contrast.models.items()]
        cells = [
            number(effect, contrast.effect),
            number(_interval(contrast) or ABSENT, contrast.low),
            number(shown(contrast.p, "{:.4f}"), contrast.p),
            DataCell(badge(contrast.verdict)),
            DataCell(", ".join(models)),
        ]
        rows.append(DataRow([head(contrast.label), *cells]))
    notes = dict.fromkeys(contrast.note for contrast in claim.contrasts if contrast.note)
    place = element("small", claim.place)
    summary = joined([badge(claim.verdict), f"({claim.id})", claim.statement, place], " ")
    grid = DataTable(f"Contrasts of ({claim.id})", headings, [rows])
    return Folded(summary, [grid, *map(Prose, notes)], "judgement")


def _interval(finding: WrittenFinding | WrittenDetail) -> str:
    """Return a 95 % confidence interval, or nothing."""
    if finding.low is None or finding.high is None:
        return ""
    return f"[{shown(finding.low, '{:+.2f}')}, {shown(finding.high, '{:+.2f}')}]"


def _ledger(inventory: Inventory, address: Address) -> Iterator[Block]:
    path = address.out / inventory.profile / LEDGER
    file = read_verdicts(LedgerFile, path, inventory.profile)
    if file is None:
        yield page.unwritten("The ledger is not written yet:", "claims", inventory.profile)
    elif isinstance(file, str):
        yield Notice(file)
    else:
        verdicts = {word: f"{word} ({n})" for word, n in verdict_counts(file).items()}
        versions = sorted({claim.version for claim in file.claims}, reverse=True)
        choices = [
            Filter("verdict", "Verdict", verdicts),
            name_filter("kind", "Kind", (claim.kind for claim in file.claims)),
            Filter("version", "Version", {version: version for version in versions}),
        ]
        caption = f"{len(file.claims)} claims and numbers, from abstract to appendix."
        headings = ("Place", "Claim", "Published", "Ours", "Verdict")
        links = _record_links(file, path.parent, inventory, address)
        yield Filters(choices)
        sources = ledger_links(inventory, address)
        rows = [_claim(claim, links, sources.get(claim.id)) for claim in file.claims]
        yield DataTable(caption, headings, [rows])
        yield from address.files("The ledger by itself:", path.with_suffix(""), _FORMATS)


def _record_links(
    file: LedgerFile, folder: Path, inventory: Inventory, address: Address
) -> list[tuple[str, str] | None]:
    """Return address and text of the page of each record that the ledger names."""
    named = inventory.named([folder / name for name in file.records])
    return [record and (address.to_record(record), str(record)) for record in named]


def _claim(
    claim: LedgerClaim, links: Sequence[tuple[str, str] | None], source: str | None
) -> DataRow:
    values = claim.published.values if claim.published else ()
    stated = [value if isinstance(value, float) else None for value in values]
    unit = claim.published.unit if claim.published else ""
    published = f"{', '.join(map(shown, stated))} {unit}".rstrip() or ABSENT
    details = [detail for finding in claim.findings for detail in finding.details]
    ours = shown_detail(claim)
    parts = [ABSENT]
    if ours:
        pattern = "{:+.2f}" if ours.unit == "points" else "{:.3g}"
        effect = f"{shown(ours.effect, pattern)} {ours.unit}".rstrip()
        parts = [link(source, effect) if source else effect]
        if len(details) > 1:
            parts.append(element("small", f" first of {len(details)}"))
        if bounds := _interval(ours):
            parts.append(Markup("<br>") + element("small", bounds))
    findings = []
    for finding in claim.findings:
        places = dict.fromkeys(place for detail in finding.details for place in detail.records)
        named = [x for place in places if place < len(links) and (x := links[place])]
        lead = f"{finding.source}, {finding.outcome}"
        findings.append(FindingInWords.of(lead, finding.text, named))
    quote = quoted(claim.quote, findings, claim.note and f"Note: {claim.note}")
    scope = element("small", f" {claim.scope}") if claim.scope else ""
    cells = [
        head(f"{claim.place} ({claim.version})"),
        DataCell(quote, "claim"),
        number(published, stated[0] if stated else None),
        number(joined(parts, ""), ours.effect if ours else None),
        DataCell(joined([badge(claim.verdict), scope], "")),
    ]
    data = {"verdict": claim.verdict, "kind": claim.kind, "version": claim.version}
    return DataRow(cells, data)
