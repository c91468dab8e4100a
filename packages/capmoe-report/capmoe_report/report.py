"""``capmoe-eval report profile=zoo``: a report to browse, from finished records."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

from capmoe_eval.errors import UsageError, field_problem, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import Parser, report_options
from capmoe_eval.experiment.commands import cell_command
from capmoe_eval.experiment.configuration import CellPlan, model_notes, planned
from capmoe_eval.experiment.datasource import DIRECTORY
from capmoe_eval.experiment.files import check_writable, read_bytes, write_text
from capmoe_eval.experiment.names import gamma_column
from capmoe_eval.experiment.record import VERDICTS, Record
from capmoe_eval.experiment.results import directories, read_records, record_places
from capmoe_eval.lazy import pd
from capmoe_eval.paper.layout import TABLES, Layout
from capmoe_eval.report.figures.catalogue import figures as catalogue
from capmoe_eval.report.figures.sources import FigurePlans
from capmoe_eval.report.tables import table as rendering
from capmoe_eval.report.tables.filled import cell_config, measured_table
from capmoe_eval.report.tables.sweep import sweep_table
from capmoe_eval.report.texts import ABSENT, shown
from hydra.errors import HydraException
from markupsafe import Markup, escape
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from capmoe_report.claims import LEDGER, WORDS, headings
from capmoe_report.evidence import models_of
from capmoe_report.records import file_with, seen_from
from capmoe_report.templates import render
from capmoe_report.verdicts import VerdictFile

T = TypeVar("T")

PAGES: Final = {
    "index.html": "Overview",
    "tables.html": "Tables",
    "figures.html": "Figures",
    "claims.html": "Claims",
    "records.html": "Records",
}
"""The files of a report, and their titles."""
_SUFFIXES: Final = ("csv", "md", "tex", "json", "svg", "pdf", "png")
"""The files that pages lead to, in their order."""
_COLUMNS: Final = (
    *("model", "task", "method", "gamma", "score", "±", "n", "enforced", "examined (%)"),
    *("dropped (%)", "peak before", "peak after", "computed", "record", "compute it again"),
)
"""The headings of the records; the first four are those that a link chooses by."""
_AGAIN: Final = "again"
"""The directory of a record that is computed again, so that the first one stays."""
_HTML: Final = rendering.Markup(
    "<strong>{}</strong>", "<small>{}</small>", "", lambda text: str(escape(text))
)


def main(words: Sequence[str] | None = None) -> None:
    """Build and exit: 0 written, 2 bad input."""
    parser = Parser(
        prog="capmoe-eval report",
        description="Build one static site from finished results: OUT/index.html. It evaluates "
        "nothing.",
    )
    parser.add_argument(
        "--all", action="store_true", help="first write tables, figures, verdicts and claims anew"
    )
    report_options(parser)
    arguments = parser.parse_intermixed_args(words)
    options = arguments.overrides, arguments.out, arguments.bench, arguments.all
    sys.exit(run_command(partial(build, *options)))


def build(overrides: Sequence[str], out: Path, bench: Path, all_parts: bool) -> int:
    """Write a report and return its exit status.

    Args:
        overrides: Those of the command line, which say of which records.
        out: The directory of the report.
        bench: The directory of the files of benchmarks.
        all_parts: Whether tables, figures, verdicts and claims are written, too.
    """
    check_writable("--out", out)
    subject = FigurePlans(overrides)
    config, plans = cell_config(subject.overrides), _table_plans(subject.overrides)
    roots = sorted({plan.root for plan in plans} or {Path(str(config.results_dir))})
    places = [
        (path, place)
        for root in roots
        for path, place in record_places(root)
        if subject.own in (None, path.parts[-3])  # the directory of its model
    ]
    link = functools.cache(lambda path: quote(seen_from(out, path)))
    broken: list[str] = []
    records = [_row(record, link) for record in read_records(places, broken)]
    counts = Counter(row["model"] for row in records)
    profile = subject.config.profile
    of_profile = {subject.own} if subject.own else models_of(profile, counts, roots[0])
    if not records:
        _refuse_nothing(roots, overrides, out)
    status = 0
    if all_parts:
        words = [f"--out={out}", *subject.overrides]
        both = [*([f"--bench={bench}"] if bench.is_dir() else []), *words]
        drawn = [["figure", "all", "--formats=svg", *both], ["table", "all", *both]]
        judges = [["replicate", *words], ["claims", *both]]
        status = _run(drawn if subject.own else judges + drawn)
    fill = partial(measured_table, overrides=subject.overrides, bench=bench)
    filled = {layout.key: _attempt(partial(fill, layout.key)) for layout in TABLES}
    if subject.own:  # whose sweep need be none of the paper's
        filled = {"sweep": _attempt(partial(sweep_table, roots[0])), **filled}
    folder = out / subject.folder
    read_from = [place for root in roots for place in directories(root)]
    verdicts, judged = _read_verdicts([place / VERDICTS for place in read_from], subject.profile)
    if subject.own:
        verdicts = f"Claims are judged on all models of a profile, not on {subject.own} alone."
    ledger = folder / LEDGER
    values = {
        "titles": PAGES,
        "subject": f"model {subject.own}" if subject.own else f"profile {subject.profile}",
        "words": " ".join(overrides) or f"profile={subject.profile}",
        "notes": model_notes(plans),
        "broken": broken,
        "columns": _COLUMNS,
        "records": records,
        "tables": filled,
        "contents": list(_table_rows(filled, subject.overrides)),
        **TABLE_PARTS,
        "figures": _figure_texts(folder / "figures"),
        "verdicts": verdicts,
        "judged": judged,
        "ledger": _read(ledger, VerdictFile.model_validate_json) if ledger.is_file() else None,
        "headings": headings,
        "kinds": WORDS["checks"],
        "profile_note": WORDS["profiles"].get(subject.profile, ""),
        "record_link": lambda path: link(file_with(folder / path)),
        "shown": shown,
        "folder": folder,
        "out": out,
        "written": lambda stem, place=folder: [
            path for suffix in _SUFFIXES if (path := place / f"{stem}.{suffix}").is_file()
        ],
        "link": link,
    }
    with writing("--out", out):
        for page in PAGES:
            text = render(f"site/{page}", page=page, **values)
            write_text(out / page, _without_places(text, [*read_from, bench, out]))
    there = [table for table in filled.values() if not isinstance(table, str)]
    remarks = {
        "of other models": sum(counts[name] for name in counts.keys() - of_profile),
        "files that are none": len(broken),
        "numbers of tables missing": sum((table["status"] == "missing").sum() for table in there),
    }
    text = "".join(f", {count} {what}" for what, count in remarks.items() if count)
    print(f"{values['subject']}: {len(records)} records{text}")
    print(f"written: {out / 'index.html'}")
    return status


def _refuse_nothing(roots: Sequence[Path], overrides: Sequence[str], out: Path) -> None:
    """Refuse to show nothing: of a directory that was named, or in place of a report of records."""
    results = ", ".join(map(str, roots))
    if any(word.lstrip("+").startswith("results_dir=") for word in overrides):
        raise UsageError(f"results_dir={results}: no whole record there; name one that has records")
    records = out / "records.html"
    if records.is_file() and '<table class="sortable" id="records">' in records.read_text("utf-8"):
        raise UsageError(
            f"--out={out}: has a report of records, and no whole record is in {results}; "
            "choose another profile, results_dir=DIR that has records, or another --out"
        )


def _without_places(page: str, places: Iterable[Path]) -> str:
    """Return a page that names what lies in some places without the directories above them.

    A place below the working directory is named from there, any other by its last part alone, below
    :data:`DIRECTORY`, which commands refuse.
    """
    here, names = Path.cwd(), dict[str, str]()
    for place in places:
        for form in (place.absolute(), place.resolve()):
            inside = form.is_relative_to(here)
            name = form.relative_to(here).as_posix() if inside else f"{DIRECTORY}/{form.name}"
            if form.name:  # not the root, which is above all
                names[str(escape(form.as_posix()))] = str(escape(name))
    longest_first = sorted(names, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w./…-])({'|'.join(map(re.escape, longest_first))})(?![\w.-])")
    return pattern.sub(lambda match: names[match[1]], page)


def _run(commands: Iterable[Sequence[str]]) -> int:
    """Run other commands, as many at a time as there are processors; return a killed one's status.

    One that cannot write its parts, or some of them, says why and fails no other: the site says
    what is missing.
    """

    def run(words: Sequence[str]) -> int:
        code = subprocess.run([sys.executable, "-m", "capmoe_eval", *words], check=False).returncode
        if code < 0:
            print(f"{words[0]} was killed (signal {-code})", file=sys.stderr)
        return 128 - code if code < 0 else code

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return max((code for code in threads.map(run, commands) if code >= 128), default=0)


def _attempt(make: Callable[[], T]) -> T | str:
    """Return what a function makes, or why it cannot, in one line."""
    try:
        return make()
    except (UsageError, HydraException, OmegaConfBaseException) as error:
        return " ".join(str(error).split())


def _read(path: Path, parse: Callable[[bytes], T]) -> T | str:
    """Return what a file of another command has, or why it cannot be read, in one line."""
    try:
        return parse(read_bytes(path))
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = field_problem(error) if isinstance(error, ValidationError) else error
        return f"{path}: cannot be read ({reason})"


def _table_plans(overrides: Sequence[str]) -> list[CellPlan]:
    """Return the plans of all tables that a command line can have."""
    layouts = [layout for layout in TABLES if isinstance(layout, Layout)]
    parts = [_attempt(partial(planned, [f"experiment={x.key}", *overrides])) for x in layouts]
    return [plan for part in parts if not isinstance(part, str) for plan in part[1]]


def _row(record: Record, link: Callable[[Path], str]) -> dict[str, Any]:
    """Return the cells of a record's row, by :data:`_COLUMNS`, and the name of the row."""
    load, proofs = record.load, record.proofs
    value, stderr, unit = record.score_in_words
    passed = sum(proof.passed is True for _, proof, _ in proofs.recorded())
    failed = f"failed: {', '.join(proofs.broken)}" if proofs.broken else ""
    made = record.provenance
    origin = made.date[:10], (made.git_revision or "")[:8], made.device.get("name")
    cells = [
        *(record.model, record.task, record.method),
        gamma_column(record.method, record.cell.method.factor),
        f"{value} {unit}",
        stderr or ABSENT,
        str(record.n),
        failed or f"{passed} passed",
        *(shown(share, "{:.1f}", 100) for share in (proofs.examined, load.drop_rate)),
        *(shown(peak, "{:.2f}") for peak in (load.peak_before, load.peak_after)),
        ", ".join(map(str, filter(None, origin))),
        Markup('<a href="{}">{}</a>').format(link(file_with(record.path)), record.path.stem),
        cell_command(record.cell, _AGAIN) or ABSENT,
    ]
    return {"id": record.path.stem, "model": record.model, "cells": cells, "failed": failed}


def _table_rows(
    filled: Mapping[str, pd.DataFrame | str], overrides: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield of each table its name, how many numbers are there and missing, and what fills it."""
    for name, table in filled.items():
        to_table = Markup('<a href="tables.html#{}">{}</a>').format(name, name)
        if isinstance(table, str):
            yield to_table, ABSENT, ABSENT, table
        else:
            counts = [(table["status"] == status).sum() for status in ("measured", "missing")]
            words = shlex.join(["capmoe-eval", "run", f"experiment={name}", *overrides])
            missing = table.attrs["commands"]
            command = words if len(missing) > 1 else "".join(missing)
            yield to_table, *(f"{count:,}" for count in counts), command


def _cell_html(cell: Any, decimals: int) -> Markup:
    """Return a cell's number with its marks, and below it what the paper prints."""
    text = rendering.cell_text(cell, _HTML, decimals)
    if published := rendering.published_text(cell, decimals):
        text += f'<br><small class="published">{published}</small>'
    return Markup(text)


def _tip(cell: Any, decimals: int) -> str:
    """Return a number's seeds, documents and test."""
    effect = f"{rendering.signed(cell.effect, decimals)} to the baseline"
    parts = [
        (bool(cell.seeds), f"seeds {cell.seeds}"),
        (not math.isnan(cell.n), f"{cell.n:,.0f} documents"),
        (not math.isnan(cell.p), f"{effect}, p = {cell.p:.2g}, corrected {cell.corrected:.2g}"),
        (cell.truncated > 0, f"prompts of {cell.truncated:,.0f} documents truncated"),
        (bool(cell.untested), f"no paired test: {cell.untested}"),
    ]
    return "; ".join(text for is_there, text in parts if is_there)


def _records_of(row: pd.DataFrame) -> str:
    """Return the fragment by which a page of records chooses those of a row, if it has any."""
    if row["model"].isna().any() or row["value"].isna().all():
        return ""
    cell = row.iloc[0]
    gamma = gamma_column(cell.method, None if math.isnan(cell.gamma) else cell.gamma)
    return urlencode({"model": cell.model, "method": cell.method, "gamma": gamma})


TABLE_PARTS: Final = {"cell_html": _cell_html, "tip": _tip, "records_of": _records_of}
"""What the template of a table needs besides the table."""


def _figure_texts(folder: Path) -> dict[str, dict[str, Any] | str]:
    """Return the words of each figure of a directory, in the catalogue's order, then the others."""
    names = {path.stem for suffix in ("json", "svg") for path in folder.glob(f"*.{suffix}")}
    ordered = [
        *(name for name in catalogue() if name in names),
        *sorted(names - catalogue().keys()),
    ]

    def words(data: bytes) -> dict[str, Any]:
        content = json.loads(data)
        return {key: content[key] for key in ("title", "place", "caption", "notes", "missing")}

    return {name: _read(folder / f"{name}.json", words) for name in ordered}


def _read_verdicts(paths: Iterable[Path], profile: str) -> tuple[VerdictFile | str, list[Path]]:
    """Return the verdicts on most records of a profile, or why there are none, and their path."""

    def parse(data: bytes) -> VerdictFile:
        file = VerdictFile.model_validate_json(data)
        if file.profile != profile:
            raise ValueError(f"verdicts of profile {file.profile}, not of {profile}")
        return file

    files = {path: _read(path, parse) for path in paths if path.is_file()}
    counts = {p: -1 if isinstance(file, str) else file.records for p, file in files.items()}
    path = max(counts, key=counts.__getitem__, default=None)
    if path is None:
        return f"Not judged yet: capmoe-eval replicate profile={profile}", []
    return files[path], [path]
