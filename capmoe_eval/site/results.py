"""The page of tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from capmoe_eval.names import NO_GAMMA, NO_LIMIT, gamma_text
from capmoe_eval.record import Record
from capmoe_eval.report import TABLES, Entry, Layout, Missing, ModelSlot, Row, RowSpec, Table, Text
from capmoe_eval.report.layout import OWN, Asked
from capmoe_eval.report.table import Cell
from capmoe_eval.site import page
from capmoe_eval.site.inventory import Experiment, Inventory
from capmoe_eval.site.loose import ABSENT
from capmoe_eval.site.markup import Child, Markup, element, join
from capmoe_eval.site.names import gamma_options, method_options
from capmoe_eval.site.page import Address, Filter, Heading
from capmoe_eval.tables import measured_table

_MARKS = {"better": ("▲", "better than the baseline"), "worse": ("▼", "worse than the baseline")}

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
    sections: list[Child] = []
    contents, lines = [], []
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
            reason = " ".join(str(error).split())
            what = element("p", f"This table cannot be filled: {reason}")
            sections.append(_section(layout.key, layout.title, page.notice(what)))
            contents.append((layout.key, layout.title))
            continue
        aligned: Sequence[_Line | None] = described
        if len(described) != len(table.rows):
            aligned = [None] * len(table.rows)
        tasks = [column.task for column in layout.tasks] if isinstance(layout, Layout) else []
        folder = address.out / inventory.profile
        filled = _table(table, aligned, tasks, folder, address)
        sections.append(_section(table.name, table.title, filled))
        contents.append((table.name, table.title))
    choices = [
        Filter("model", "Model", {name: name for name in sorted({x.model for x in lines})}),
        Filter("method", "Method", method_options(x.method for x in lines)),
        Filter("gamma", "γ", gamma_options(x.gamma for x in lines)),
    ]
    listed = [element("li", element("a", title, href=f"#{key}")) for key, title in contents]
    return page.frame(
        address,
        "Tables",
        inventory.profile,
        element(
            "p",
            "A number leads to the record it was taken from; ± is one standard error, two numbers "
            "in brackets are quartiles; bold is the highest of a block of the paper's table. A "
            "heading sorts its table: ascending, descending, as it was.",
        ),
        [element("p", element("strong", note)) for note in inventory.notes],
        element("details", element("summary", "Contents"), element("ul", listed)),
        page.filters(choices, keeps_baselines=True),
        sections,
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


def _section(key: str, title: str, *content: Child) -> Markup:
    heading = element("h2", title, id=f"{key}-title")
    return join(
        "\n",
        element(
            "section",
            heading,
            "\n",
            content,
            id=key,
            aria_labelledby=f"{key}-title",
            class_="result",
        ),
    )


def _table(
    table: Table,
    lines: Sequence[_Line | None],
    tasks: Sequence[str],
    folder: Path,
    address: Address,
) -> Markup:
    words = [
        any(isinstance(row.entries[index], Text) for row in table.rows)
        for index in range(len(table.columns))
    ]
    headings = [Heading(text) for text in table.label_headings]
    headings += [Heading(t, not w) for t, w in zip(table.columns, words, strict=True)]
    bodies, place = [], 0
    for block in table.blocks:
        best = [block.best(column, table.decimals) for column in range(len(table.columns))]
        body = []
        for index, row in enumerate(block.rows):
            bold = [index in column for column in best]
            body.append(_row(table, row, bold, lines[place], tasks, address))
            place += 1
        bodies.append(page.rows(body))
    return page.sortable(
        table.caption,
        headings,
        bodies,
        _files(table, folder, address),
        _missing(table),
        _notes(table),
    )


def _row(
    table: Table,
    row: Row,
    bold: Sequence[bool],
    line: _Line | None,
    tasks: Sequence[str],
    address: Address,
) -> Markup:
    labels = [
        element("th", label, scope="row", data_value={NO_LIMIT: 1e9, NO_GAMMA: -1}.get(label))
        for label in row.labels
    ]
    cells = []
    for column, (cell, best) in enumerate(zip(row.entries, bold, strict=True)):
        records = line.records(tasks[column]) if line and column < len(tasks) else []
        cells.append(_cell(cell, best, records, table.decimals, address))
    return element(
        "tr",
        labels,
        cells,
        data_model=line.model if line else None,
        data_method=line.method if line else None,
        data_gamma=line.gamma if line else None,
    )


def _cell(
    cell: Cell, best: bool, records: Sequence[Record], decimals: int, address: Address
) -> Markup:
    if isinstance(cell, Text):
        return element("td", cell.text)
    if isinstance(cell, Missing):
        return element("td", ABSENT, class_="number missing", title=cell.command)
    value: Child = f"{cell.value:.{decimals}f}".replace("-", "−")
    if records:
        value = element("a", value, href=address.to(page.cell_path(records[0])))
    if best:
        value = element("strong", value)
    parts: list[Child] = [value]
    if cell.test is not None and cell.test.verdict is not None:
        mark, meaning = _MARKS[cell.test.verdict]
        parts.append(
            element("span", mark, class_=cell.test.verdict, role="img", aria_label=meaning)
        )
    if cell.quartiles is not None:
        low, high = cell.quartiles
        parts.append(element("small", f" ({low:.{decimals}f}–{high:.{decimals}f})"))
    if cell.stderr is not None:
        parts.append(element("small", f" ± {cell.stderr:.{decimals}f}"))
    if cell.published is not None:
        there = cell.published
        z = "" if there.z is None else f", z {there.z:+.1f}"
        told = f"published {there.value:.{decimals}f} ({there.difference:+.{decimals}f}{z})"
        told = told.replace("-", "−")
        parts += [Markup("<br>"), element("small", told, class_="published")]
    return element(
        "td",
        parts,
        class_="number",
        data_value=repr(float(cell.value)),
        title=_told(cell, decimals) or None,
    )


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


def _files(table: Table, folder: Path, address: Address) -> Child:
    """Return links to the table's other formats, where they have been written."""
    found = [
        element("a", name, href=address.to_file(path))
        for suffix, name in (("csv", "CSV"), ("md", "Markdown"), ("tex", "LaTeX"))
        if (path := folder / f"{table.name}.{suffix}").is_file()
    ]
    if not found:
        return None
    links = [join(" " if index else "", link) for index, link in enumerate(found)]
    return element("p", "Also as ", links, class_="files")


def _missing(table: Table) -> Child:
    commands = table.missing_commands
    if not commands:
        return None
    count = sum(isinstance(cell, Missing) for row in table.rows for cell in row.entries)
    noun = "entry is" if count == 1 else "entries are"
    return element(
        "details",
        element("summary", f"{count} {noun} missing: the commands that measure them"),
        element("pre", element("code", "\n".join(commands)), tabindex="0"),
        class_="holes",
    )


def _notes(table: Table) -> Child:
    if not table.notes:
        return None
    lines = [
        element("li", note, class_="wrong" if note.startswith("left out") else None)
        for note in table.notes
    ]
    return element("ul", lines, class_="notes")
