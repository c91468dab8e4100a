"""The page of the records behind each number of the claims: of contrasts, and of the ledger."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from capmoe_eval.report.claims.render import LedgerClaim, LedgerFile, WrittenDetail
from capmoe_eval.report.replication.records import RECORDS, ContrastFile
from capmoe_eval.report.site import page
from capmoe_eval.report.site.blocks import (
    Block,
    DataCell,
    DataRow,
    DataTable,
    Prose,
    Section,
    head,
    joined,
    link,
)
from capmoe_eval.report.site.inventory import Brief, Inventory, read
from capmoe_eval.report.site.page import Address
from capmoe_eval.report.templates import shown

Key = TypeVar("Key")
LEDGER: Final = "claims.json"
_ABOUT: Final = (
    "The records behind each effect of the replication, and behind each number of the ledger, "
    "with their scores in percent. A mix of tasks has one score for all of them."
)


class _Source(NamedTuple):
    """A number of a claim, and the paths of what it was computed from."""

    place: str  # its name on the page
    title: str
    effect: float
    paths: list[Path]


def sources_page(inventory: Inventory, address: Address) -> str:
    """Return the page of the records behind the numbers of claims."""
    sources = *_contrasts(inventory, address).values(), *_ledger(inventory, address).values()
    blocks: list[Block] = [Prose(_ABOUT)]
    for source in sources:
        effect = Prose(f"Effect: {shown(source.effect, '{:+.5g}')}")
        rows = [*_rows(source.paths, inventory, address)]
        records = DataTable(source.title, ("Model", "Task", "Records"), [rows], is_sortable=False)
        blocks.append(Section(source.title, [effect, records], source.place))
    return page.render_page(address, "Records of claims", inventory.profile, blocks)


def contrast_links(inventory: Inventory, address: Address) -> Mapping[tuple[str, str, float], str]:
    """Return the address of each contrast's records, by its claim, label and effect."""
    return _links(_contrasts(inventory, address), address)


def ledger_links(inventory: Inventory, address: Address) -> Mapping[str, str]:
    """Return the address of the records of each claim of the ledger, by the claim."""
    return _links(_ledger(inventory, address), address)


def _links(sources: Mapping[Key, _Source], address: Address) -> Mapping[Key, str]:
    return {key: f"{address.to(page.SOURCES)}#{source.place}" for key, source in sources.items()}


def _contrasts(inventory: Inventory, address: Address) -> dict[tuple[str, str, float], _Source]:
    path = address.out / inventory.profile / RECORDS
    file = read(ContrastFile, path)
    if isinstance(file, str):
        return {}
    return {
        (each.claim, each.label, each.effect): _Source(
            f"contrast-{number}",
            f"({each.claim}) {each.label}",
            each.effect,
            [path.parent / name for name in each.paths],
        )
        for number, each in enumerate(file.root, 1)
    }


def _ledger(inventory: Inventory, address: Address) -> dict[str, _Source]:
    path = address.out / inventory.profile / LEDGER
    file = read(LedgerFile, path)
    if isinstance(file, str) or file.profile != inventory.profile:
        return {}
    sources = {}
    for claim in file.claims:
        if (detail := shown_detail(claim)) and detail.records:
            place = "ledger-" + re.sub(r"[^A-Za-z0-9-]", "-", claim.id)
            title = f"{claim.place} ({claim.version}): {detail.label}"
            paths = [path.parent / file.records[n] for n in detail.records if n < len(file.records)]
            sources[claim.id] = _Source(place, title, detail.effect, paths)
    return sources


def shown_detail(claim: LedgerClaim) -> WrittenDetail | None:
    """Return the number of a claim that the ledger shows: what decided it, else its first."""
    details = [detail for finding in claim.findings for detail in finding.details]
    decided = (detail for detail in details if detail.label == claim.decided_by)
    return next(itertools.chain(decided, details), None)


def _rows(paths: Iterable[Path], inventory: Inventory, address: Address) -> Iterator[DataRow]:
    """Yield the records of each model and task, and files that are no records."""
    pairs = zip(paths, inventory.named(paths), strict=True)

    def home(pair: tuple[Path, Brief | None]) -> tuple[str, str]:
        return (pair[1].model, pair[1].task) if pair[1] else ("", "")

    for (model, task), same in itertools.groupby(pairs, home):
        links = [_link(path, record, address) for path, record in same]
        yield DataRow([head(model), DataCell(task), DataCell(joined(links))])


def _link(path: Path, record: Brief | None, address: Address) -> str:
    if record is None:  # a file of timings or trainings, or one that is gone
        return link(address.to_file(path), path.name) if path.is_file() else path.name
    score = shown(record.value, "{:.1f}", 100)
    return joined([link(address.to_record(record), record.label), score], " ")
