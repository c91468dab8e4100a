"""``capmoe-eval report profile=zoo``: a report to browse, from finished records."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import multiprocessing
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from importlib.resources import files
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, TypeAlias

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser, report_options
from capmoe_eval.experiment.composition import config_directory
from capmoe_eval.experiment.files import check_writable, write_text
from capmoe_eval.experiment.record import VERDICTS
from capmoe_eval.experiment.results import Reader, record_places
from capmoe_eval.paper.benchmarks import check_folder
from capmoe_eval.report.claims import command as claims
from capmoe_eval.report.figures import command as figures
from capmoe_eval.report.figures.catalogue import figures as all_figures
from capmoe_eval.report.replication import command as replication
from capmoe_eval.report.site import page
from capmoe_eval.report.site.claims import claims_page
from capmoe_eval.report.site.efficiency import efficiency_page
from capmoe_eval.report.site.inventory import (
    Inventory,
    missing_cells,
    results_directories,
    take_inventory,
)
from capmoe_eval.report.site.page import Address, without_places
from capmoe_eval.report.site.pages import figures_page, images_page, overview_page
from capmoe_eval.report.site.records import (
    list_page,
    lists,
    record_page,
    records_page,
    relatives,
)
from capmoe_eval.report.site.sources import sources_page
from capmoe_eval.report.site.tables import means_page, tables_page
from capmoe_eval.report.tables import command as tables

_BUILT: Final = ".built.json"
"""Says, in the directory of a report, what it was built of, so that it is not built again."""
_LIBRARIES: Final = ("jinja2", "matplotlib", "numpy", "pandas", "pydantic", "scipy")

_Pages: TypeAlias = Mapping[str, Callable[[Inventory, Address], str]]

_OF_RECORDS: Final[_Pages] = {
    page.TABLES: tables_page,
    page.MEANS: means_page,
    page.RECORDS: records_page,
}
_OF_OTHERS: Final[_Pages] = {
    page.OVERVIEW: overview_page,
    page.FIGURES: figures_page,
    page.IMAGES: images_page,
    page.EFFICIENCY: efficiency_page,
    page.CLAIMS: claims_page,
    page.SOURCES: sources_page,
}


def main(words: Sequence[str] | None = None) -> None:
    """Build and exit: 0 written, 2 bad input."""
    parser = Parser(
        prog="capmoe-eval report",
        description="Build one static site from finished results: OUT/index.html. It evaluates "
        "nothing.",
    )
    parser.add_argument(
        "--replication",
        type=PATH,
        help=f"verdicts of the replication (default: {VERDICTS} in the results directory)",
    )
    parser.add_argument(
        "--all", action="store_true", help="first write tables, figures, verdicts and claims anew"
    )
    report_options(parser)
    arguments = parser.parse_intermixed_args(words)
    options = arguments.out, arguments.bench, arguments.replication, arguments.all
    sys.exit(run_command(partial(build, arguments.overrides, *options)))


def build(
    overrides: Sequence[str], out: Path, bench: Path, replication_file: Path | None, all_parts: bool
) -> int:
    """Write a report and return its exit status.

    Args:
        overrides: Those of the command line, which say of which records.
        out: The directory of the report.
        bench: The directory of the files of benchmarks.
        replication_file: The verdicts of the replication; None for the profile's own.
        all_parts: Whether tables, figures, verdicts and claims are written, too.
    """
    check_writable("--out", out)
    check_folder(bench)
    if replication_file and not replication_file.is_file():
        raise UsageError(f"--replication={replication_file}: no such file; leave it out")
    states = partial(_states, overrides, out, bench, replication_file)
    before = states() if all_parts else None
    if before and _read(out / _BUILT) == [*before]:
        print("nothing has changed since this report was built")
        print(f"written: {out / 'index.html'}")
        return 0
    reader, roots = Reader(), results_directories(overrides)
    _refuse_nothing(any(map(record_places, roots)), roots, overrides, out)
    inventory = take_inventory(overrides, bench, reader)
    _refuse_nothing(bool(inventory.records), roots, overrides, out)
    inventory = dataclasses.replace(inventory, chosen_verdicts=replication_file)
    cells = partial(write_pages, cell_pages(inventory, out), out)
    beside = []
    if all_parts:
        gc.freeze()  # no collection goes through all records again
        words, place = [f"--out={out}", *overrides], f"--bench={bench}"
        beside = [
            _start(
                partial(replication.main, words, reader),
                partial(claims.main, [place, *words], reader),
            ),
            _start(
                partial(figures.main, ["all", "--formats=svg", place, *words], reader),
                cells,
            ),
        ]
        _write(partial(tables.main, ["all", place, *words], reader))
    else:
        cells()
    write_pages(list_pages(inventory, out), out)
    status = max(map(_ended, beside), default=0)
    write_pages(main_pages(inventory, out), out)
    paths = {page.cell_path(record) for record in inventory.paged}
    counts = {
        "files that are none": len(inventory.broken),
        "unreadable files of benchmarks": len(inventory.bench.broken),
        "cells of tables missing": sum(map(missing_cells, inventory.experiments.values())),
        "old pages deleted": delete_others(paths | lists(inventory.records).keys(), out),
    }
    remarks = "".join(f", {count} {what}" for what, count in counts.items() if count)
    print(f"profile {inventory.profile}: {len(inventory.records)} records{remarks}")
    print(f"written: {out / 'index.html'}")
    if before and not status and before[0] == (after := states())[0]:
        with writing("--out", out):
            write_text(out / _BUILT, json.dumps(after))
    return status


def _states(
    overrides: Sequence[str], out: Path, bench: Path, replication_file: Path | None
) -> tuple[str, str]:
    """Return digests over all that a report is made of, and over all that it writes."""
    words = [*overrides, str(bench), str(replication_file), sys.version]
    words += [f"{name}=={metadata.version(name)}" for name in _LIBRARIES]
    named = [Path(word.partition("=")[2]) for word in overrides if "results_dir=" in word]
    chosen = [] if replication_file is None else [replication_file]
    packages = {spec.package.partition(".")[0] for spec in all_figures().values()}
    code = [config_directory(), *(Path(str(files(name))) for name in packages)]
    places = [Path("results"), bench, *named, *code]
    read = [file for place in places for file in place.rglob("*")]
    written = [file for file in read if file.name == VERDICTS]
    made_of = {*read, *chosen}.difference(written)
    return _digest(made_of, words), _digest([*written, *out.rglob("*")])


def _digest(paths: Iterable[Path], words: Sequence[str] = ()) -> str:
    """Return a digest over words, and over name, size and time of files."""
    digest = hashlib.sha256(repr(words).encode())
    for path in sorted(path for path in paths if path.name != _BUILT and path.suffix != ".pyc"):
        about = path.lstat()
        if not stat.S_ISDIR(about.st_mode):
            digest.update(repr((str(path), about.st_size, about.st_mtime_ns)).encode())
    return digest.hexdigest()


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _refuse_nothing(
    there: bool, roots: Sequence[Path], overrides: Sequence[str], out: Path
) -> None:
    """Refuse to show nothing: of a directory that was named, or in place of a report of records."""
    if there:
        return
    results = ", ".join(map(str, roots))
    if any(word.lstrip("+").startswith("results_dir=") for word in overrides):
        raise UsageError(f"results_dir={results}: no whole record there; name one that has records")
    if any(_pages_of_records(out)):
        raise UsageError(
            f"--out={out}: has a report of records, and no whole record is in {results}; "
            "choose another profile, results_dir=DIR that has records, or another --out"
        )


def _start(*parts: Callable[[], None]) -> BaseProcess:
    """Start a process that writes parts; it has what this one has read."""
    run = partial(_write, *parts)
    process = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(run_command(run)), daemon=True
    )
    process.start()
    return process


def _write(*parts: Callable[[], None]) -> int:
    """Write parts; a command that cannot write its own, and says why, stops no other."""
    for part in parts:
        try:
            part()
        except SystemExit as ended:
            # 128 and more: the number of a signal.
            if isinstance(ended.code, int) and ended.code >= 128:
                raise
    return 0


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
