"""``python -m capmoe_eval.site profile=zoo``: a report to browse, from finished records."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import multiprocessing
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, TypeAlias

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import Parser, report_options
from capmoe_eval.experiment.configuration import load_options, options
from capmoe_eval.experiment.files import check_writable, write_text
from capmoe_eval.experiment.record import VERDICTS
from capmoe_eval.experiment.results import Reader, directories, read_results, record_places
from capmoe_eval.paper.benchmarks import check_folder
from capmoe_eval.report.advice import command as advice
from capmoe_eval.report.claims import command as claims
from capmoe_eval.report.figures import command as figures
from capmoe_eval.report.figures.catalogue import FIGURES
from capmoe_eval.report.replication import command as replication
from capmoe_eval.report.site import page, serving
from capmoe_eval.report.site.claims import claims_page
from capmoe_eval.report.site.efficiency import efficiency_page
from capmoe_eval.report.site.figures import figures_page
from capmoe_eval.report.site.images import images_page
from capmoe_eval.report.site.inventory import (
    Inventory,
    missing_cells,
    results_directories,
    take_inventory,
)
from capmoe_eval.report.site.overview import overview_page
from capmoe_eval.report.site.page import Address
from capmoe_eval.report.site.places import without_places
from capmoe_eval.report.site.records import (
    list_page,
    lists,
    record_page,
    records_page,
    relatives,
)
from capmoe_eval.report.site.results import tables_page
from capmoe_eval.report.tables import command as tables

_Pages: TypeAlias = Mapping[str, Callable[[Inventory, Address], str]]

_OF_RECORDS: Final[_Pages] = {page.TABLES: tables_page, page.RECORDS: records_page}
_OF_OTHERS: Final[_Pages] = {
    page.OVERVIEW: overview_page,
    page.FIGURES: figures_page,
    page.IMAGES: images_page,
    page.EFFICIENCY: efficiency_page,
    page.SERVING: serving.serving_page,
    page.CLAIMS: claims_page,
}

_Part: TypeAlias = Callable[[], None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Build and exit: 0 written, 2 bad input."""
    parser = Parser(
        prog="python -m capmoe_eval.site",
        description="Make one static site of finished results: OUT/index.html.",
    )
    parser.add_argument(
        "--replication",
        type=Path,
        help=f"verdicts of the replication (default: {VERDICTS} in the results directory)",
    )
    parser.add_argument(
        "--all", action="store_true", help="write tables, figures, verdicts and claims first, too"
    )
    report_options(parser)
    given = parser.parse_intermixed_args(arguments)

    def report() -> int:
        check_writable("--out", given.out)
        reader, roots = Reader(), results_directories(given.overrides)
        check_folder(given.bench)
        if given.replication and not given.replication.is_file():
            raise UsageError(f"--replication={given.replication}: no such file; leave it out")
        _refuse_nothing(any(map(record_places, roots)), roots, given)
        words, bench = [f"--out={given.out}", *given.overrides], f"--bench={given.bench}"
        beside = []
        if given.all:
            gc.disable()  # it would go through all records again and again, in vain
            places = (place for root in roots for place in directories(root))
            names = {path.name for place in places for path in place.glob("*/")}
            load_options("model", names.intersection(options("model")))
            drawn = partial(_draw, ["--formats=svg", bench, *words], reader)
            beside.append(_start(partial(drawn, of_studies=False)))
            records = [record for root in roots for record in read_results(root, reader).records]
            _refuse_nothing(bool(records), roots, given)
            load_options("tasks", options("tasks"))
            importlib.import_module("scipy.special")  # which each process would import by itself
            judged = partial(replication.main, words, reader)
            claimed = partial(claims.main, [bench, *words], reader)
            beside.append(_start(judged, claimed, partial(drawn, of_studies=True)))
        inventory = take_inventory(given.overrides, given.bench, reader)
        _refuse_nothing(bool(inventory.records), roots, given)
        inventory = dataclasses.replace(inventory, chosen_verdicts=given.replication)
        write_cells = partial(write_pages, cell_pages(inventory, given.out), given.out)
        if given.all:
            place = serving.folder(given.out, inventory.profile)
            asked = serving.example_words(inventory, place)
            beside.append(_start(partial(_advise, asked, reader), write_cells))
            _write(partial(tables.main, ["all", bench, *words], reader))
        else:
            write_cells()
        write_pages(list_pages(inventory, given.out), given.out)
        status = max(map(_ended, beside), default=0)
        write_pages(main_pages(inventory, given.out), given.out)
        cells = {page.cell_path(record) for record in inventory.paged}
        deleted = delete_others(cells | lists(inventory.records).keys(), given.out)
        counts = {
            "files that are none": len(inventory.broken),
            "unreadable files of benchmarks": len(inventory.bench.broken),
            "cells of tables missing": sum(map(missing_cells, inventory.experiments.values())),
            "old pages deleted": deleted,
        }
        told = "".join(f", {count} {what}" for what, count in counts.items() if count)
        print(f"profile {inventory.profile}: {len(inventory.records)} records{told}")
        print(f"written: {given.out / 'index.html'}")
        return status

    sys.exit(run_command(report))


def _refuse_nothing(there: bool, roots: Sequence[Path], given: argparse.Namespace) -> None:
    """Refuse to show nothing: of a directory that was named, or in place of a report of records."""
    if there:
        return
    results = ", ".join(map(str, roots))
    if any(word.lstrip("+").startswith("results_dir=") for word in given.overrides):
        raise UsageError(f"results_dir={results}: no whole record there; name one that has records")
    if any(_pages_of_records(given.out)):
        raise UsageError(
            f"--out={given.out}: has a report of records, and no whole record is in {results}; "
            "choose another profile, results_dir=DIR that has records, or another --out"
        )


def _draw(words: Sequence[str], reader: Reader, *, of_studies: bool) -> None:
    """Draw the figures of efficiency studies, which show no records, or all others."""
    names = [spec.name for spec in FIGURES if bool(spec.study) == of_studies]
    figures.main([",".join(names), *words], reader)


def _advise(words: Sequence[str], reader: Reader) -> None:
    from capmoe_eval.serving.trace_file import load_trace

    advice.main(lambda path, *_: load_trace(path), words, reader)


def _start(*parts: _Part) -> BaseProcess:
    """Start a process that writes parts; it has what this one has read."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_write_beside, args=parts, daemon=True)
    process.start()
    return process


def _write_beside(*parts: _Part) -> None:
    sys.exit(run_command(lambda: _write(*parts)))


def _write(*parts: _Part) -> None:
    """Write parts; a command that cannot write its own, and says why, stops no other."""
    for part in parts:
        try:
            part()
        except SystemExit as ended:
            # 128 and more: the number of a signal.
            if isinstance(ended.code, int) and ended.code >= 128:
                raise


def _ended(process: BaseProcess) -> int:
    """Wait for a process, and return its exit status; it has said what is wrong, unless killed."""
    process.join()
    code = process.exitcode or 0
    if code < 0:
        print(f"a process that writes parts was killed (signal {-code})", file=sys.stderr)
    return code if code >= 0 else 128 - code


def list_pages(inventory: Inventory, out: Path) -> Iterator[tuple[str, str]]:
    """Yield path below ``out`` and text of the pages of tables and of all records."""

    def pages() -> Iterator[tuple[str, str]]:
        yield from _made(_OF_RECORDS, inventory, out)
        for path, records in lists(inventory.records).items():
            yield path, list_page(records, inventory.profile, Address(path, out))

    yield from without_places(pages(), inventory.places(out))


def cell_pages(inventory: Inventory, out: Path) -> Iterator[tuple[str, str]]:
    """Yield path below ``out`` and text of the page of each record that has one."""

    def pages() -> Iterator[tuple[str, str]]:
        others = relatives(inventory.paged)
        for record in inventory.paged:
            path = page.cell_path(record)
            address = Address(path, out)
            yield path, record_page(record, inventory.profile, others[record.path], address)

    yield from without_places(pages(), inventory.places(out))


def main_pages(inventory: Inventory, out: Path) -> Iterator[tuple[str, str]]:
    """Yield path below ``out`` and text of every other file of the site.

    Figures, claims and the picture of the verdicts are looked for in ``out``.
    """
    yield from without_places(_made(_OF_OTHERS, inventory, out), inventory.places(out))
    for path in (page.STYLE, page.SCRIPT):
        asset = files("capmoe_eval.report.site") / "assets" / path.rpartition("/")[2]
        yield path, asset.read_text(encoding="utf-8")


def _made(pages: _Pages, inventory: Inventory, out: Path) -> Iterator[tuple[str, str]]:
    for path, make in pages.items():
        yield path, make(inventory, Address(path, out))


def write_pages(pages: Iterable[tuple[str, str]], out: Path) -> None:
    """Write pages by their path below ``out``; a file that says the same already is left alone.

    Raises:
        UsageError: If a file cannot be written.
    """
    for path, text in pages:
        file = out / path
        with writing("--out", out):
            if not file.is_file() or file.read_bytes() != text.encode("utf-8"):
                write_text(file, text, durable=False)


def delete_others(pages: Collection[str], out: Path) -> int:
    """Delete the pages of cells that an earlier run wrote and this one did not.

    Args:
        pages: The paths of those of this run, below ``out``.
        out: The directory of the report.

    Returns:
        Number of the deleted.

    Raises:
        UsageError: If a file cannot be deleted.
    """
    with writing("--out", out):
        gone = list(_pages_of_records(out, pages))
        for file in gone:
            file.unlink()
    return len(gone)


def _pages_of_records(out: Path, pages: Collection[str] = ()) -> Iterator[Path]:
    """Yield the pages of records that this package wrote to ``out``, without some of them."""
    mark = f'<meta name="generator" content="{page.GENERATOR}">'
    for file in sorted((out / page.CELLS).glob("*/*/*.html")):
        other = file.relative_to(out).as_posix() not in pages
        if other and mark in file.read_text(encoding="utf-8", errors="replace"):
            yield file
