"""The page of tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from capmoe_eval.experiment.names import NO_GAMMA, NO_LIMIT, gamma_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.paper.layout import OWN, Asked, Layout, ModelSlot, RowSpec
from capmoe_eval.paper.tables import TABLES
from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Experiment, Inventory
from capmoe_eval.report.site.names import gamma_options, method_options
from capmoe_eval.report.site.page import Address, Filter, Frame
from capmoe_eval.report.tables.measured import measured_table
from capmoe_eval.report.tables.render import quartiles
from capmoe_eval.report.tables.table import Cell, Entry, Missing, Published, Row, Table, Text
from capmoe_eval.report.templates import render

Found = Mapping[tuple[object, ...], Sequence[Record]]


class _Line:
    """What a row of a table is of, and the records behind it."""

    def __init__(self, slot: ModelSlot, spec: RowSpec, found: Found) -> None:
        self.model = slot.key
        self.method = spec.method
        number = slot.gamma if spec.gamma == OWN else spec.gamma
        assert number is None or isinstance(number, (int, float))
        self.gamma = gamma_text(spec.method, number)
        self._asked = Asked.of(slot, spec, number)
        self._key = (slot.key, self._asked.method, self._asked.gamma)
        self._found = found

    def records(self, task: str) -> list[Record]:
        """Return the records of a column, of several seeds the lowest first."""
        found = self._found.get((*self._key, task), ())
        fitting = [record for record in found if self._asked.fits(record.knobs)]
        return sorted(fitting, key=lambda record: (record.seed or 0, record.cell.digest))


def tables_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all tables."""
    experiments = {experiment.layout.key: experiment for experiment in inventory.experiments}
    tables: list[dict[str, object]] = []
    lines = []
    for layout in TABLES:
        experiment = experiments.get(layout.key)
        described = list(_lines(experiment)) if experiment else []
        lines += described
        try:
            table, _ = measured_table(
                layout.key, inventory.overrides, inventory.reader, inventory.bench
            )
        except (
            ArithmeticError,
            HydraException,
            LookupError,
            OmegaConfBaseException,
            TypeError,
            ValueError,
        ) as error:
            problem = " ".join(str(error).split())
            tables.append({"key": layout.key, "title": layout.title, "problem": problem})
            continue
        aligned: Sequence[_Line | None] = described
        if len(described) != len(table.rows):
            aligned = [None] * len(table.rows)
        tasks = [column.task for column in layout.tasks] if isinstance(layout, Layout) else []
        folder = address.out / inventory.profile
        tables.append(_table(table, aligned, tasks, folder, address))
    choices = [
        Filter("model", "Model", {name: name for name in sorted({x.model for x in lines})}),
        Filter("method", "Method", method_options(x.method for x in lines)),
        Filter("gamma", "γ", gamma_options(x.gamma for x in lines)),
    ]
    return render(
        "tables",
        frame=Frame(address, "Tables", inventory.profile),
        notes=inventory.notes,
        choices=choices,
        tables=tables,
    )


def _lines(experiment: Experiment) -> Iterator[_Line]:
    """Yield what each row is of, in the order in which a layout is filled."""
    found: defaultdict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in experiment.records:
        found[record.model, record.method, record.gamma, record.task].append(record)
    for slot in experiment.slots:
        for block in experiment.layout.blocks:
            for spec in block:
                yield _Line(slot, spec, found)


def _table(
    table: Table,
    lines: Sequence[_Line | None],
    tasks: Sequence[str],
    folder: Path,
    address: Address,
) -> dict[str, object]:
    words = [
        any(isinstance(row.entries[index], Text) for row in table.rows)
        for index in range(len(table.columns))
    ]
    headings = [(text, "") for text in table.label_headings]
    headings += [(t, "" if w else "number") for t, w in zip(table.columns, words, strict=True)]
    blocks, place = [], 0
    for block in table.blocks:
        best = [block.best(column, table.decimals) for column in range(len(table.columns))]
        rows = []
        for index, row in enumerate(block.rows):
            bold = [index in column for column in best]
            rows.append(_row(table, row, bold, lines[place], tasks, address))
            place += 1
        blocks.append(rows)
    count = sum(isinstance(cell, Missing) for row in table.rows for cell in row.entries)
    told = f"{count} {'entry is' if count == 1 else 'entries are'} missing"
    return {
        "key": table.name,
        "title": table.title,
        "problem": "",
        "caption": table.caption,
        "headings": headings,
        "blocks": blocks,
        "files": [
            address.link_to_file(path, name)
            for suffix, name in (("csv", "CSV"), ("md", "Markdown"), ("tex", "LaTeX"))
            if (path := folder / f"{table.name}.{suffix}").is_file()
        ],
        "missing": f"{told}: the commands that measure them" if table.missing_commands else None,
        "commands": table.missing_commands,
        "notes": table.notes,
    }


def _row(
    table: Table,
    row: Row,
    bold: Sequence[bool],
    line: _Line | None,
    tasks: Sequence[str],
    address: Address,
) -> dict[str, object]:
    entries = []
    for column, (cell, best) in enumerate(zip(row.entries, bold, strict=True)):
        records = line.records(tasks[column]) if line and column < len(tasks) else []
        entries.append(_entry(cell, best, records, table.decimals, address))
    labels = [(label, {NO_LIMIT: 1e9, NO_GAMMA: -1}.get(label)) for label in row.labels]
    return {"of": line, "labels": labels, "entries": entries}


def _entry(
    cell: Cell, best: bool, records: Sequence[Record], decimals: int, address: Address
) -> dict[str, object]:
    if isinstance(cell, Text):
        return {"words": cell.text}
    if isinstance(cell, Missing):
        return {"command": cell.command}
    found: dict[str, object] = {
        "value": f"{cell.value:.{decimals}f}".replace("-", "−"),
        "sorts": repr(float(cell.value)),
        "best": best,
        "verdict": cell.test and cell.test.verdict,
        "quartiles": cell.quartiles and quartiles(cell.quartiles, decimals),
        "stderr": None if cell.stderr is None else f"{cell.stderr:.{decimals}f}",
        "published": cell.published and _published(cell.published, decimals),
        "origin": _told(cell, decimals),
    }
    if records:
        found["href"] = address.to(page.cell_path(records[0]))
    return found


def _published(there: Published, decimals: int) -> str:
    z = "" if there.z is None else f", z {there.z:+.1f}"
    told = f"published {there.value:.{decimals}f} ({there.difference:+.{decimals}f}{z})"
    return told.replace("-", "−")


def _told(entry: Entry, decimals: int) -> str:
    """Return what a pointer resting on an entry is told."""
    parts = []
    if entry.seeds:
        parts.append(f"mean of seeds {', '.join(map(str, entry.seeds))}")
    if entry.documents is not None:
        parts.append(f"{entry.documents:,} documents")
    test = entry.test
    if test is not None and test.corrected is not None:
        parts.append(
            f"{test.effect:+.{decimals}f} to the baseline, p = {test.p:.2g}, corrected "
            f"{test.corrected:.2g}".replace("-", "−")
        )
    if entry.untested:
        parts.append(f"no paired test: {entry.untested}")
    return "; ".join(parts)
