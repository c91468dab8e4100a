"""``capmoe-eval report profile=zoo``: a report to browse, from finished records."""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from capmoe_bench.timings import read_bench
from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser, report_options
from capmoe_eval.experiment.configuration import model_notes
from capmoe_eval.experiment.files import check_writable, write_text
from capmoe_eval.experiment.record import VERDICTS
from capmoe_eval.experiment.results import directories, each_record, record_places
from capmoe_eval.report.figures import command as figures
from capmoe_eval.report.figures.sources import FigurePlans
from capmoe_eval.report.tables import command as tables
from capmoe_eval.report.tables.filled import cell_config
from capmoe_eval.report.tables.sweep import sweep_table
from capmoe_eval.report.tables.table import commands as missing_commands
from markupsafe import Markup

from capmoe_report import claims, contents, replicate
from capmoe_report.table_html import to_html
from capmoe_report.templates import render

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
    if replication_file and not replication_file.is_file():
        raise UsageError(f"--replication={replication_file}: no such file; leave it out")
    subject = FigurePlans(overrides)
    config = cell_config(subject.overrides)
    plans = contents.table_plans(subject.overrides)
    roots = sorted({plan.root for plan in plans} or {Path(str(config.results_dir))})
    places = [
        (path, place)
        for root in roots
        for path, place in record_places(root)
        if subject.own in (None, path.parts[-3])  # the directory of its model
    ]
    link, broken = contents.linker(out), list[str]()
    rows = list(contents.rows_of(each_record(places, broken), link))
    if not rows:
        _refuse_nothing(roots, overrides, out)
    status = 0
    if all_parts:
        status = _write_parts(subject, f"--out={out}", f"--bench={bench}")
    filled = contents.filled_tables(subject.overrides, bench)
    if subject.own:  # whose sweep need be none of the paper's
        filled = {"sweep": contents.attempt(partial(sweep_table, roots[0])), **filled}
    folder, timings = out / subject.profile, read_bench(bench)
    read_from = [place for root in roots for place in directories(root)]
    judged = [place / VERDICTS for place in read_from]
    values = {
        "titles": PAGES,
        "subject": f"model {subject.own}" if subject.own else f"profile {subject.profile}",
        "words": " ".join(overrides) or f"profile={subject.profile}",
        "notes": model_notes(plans),
        "broken": broken,
        "columns": contents.COLUMNS,
        "records": rows,
        "models": sorted({row["cells"][0] for row in rows}),
        "tasks": sorted({row["cells"][1] for row in rows}),
        "tables": filled,
        "contents": list(contents.table_rows(filled, overrides)),
        "html_of": lambda table: Markup(to_html(table, "records.html")),
        "missing_commands": missing_commands,
        "figures": contents.figure_texts(folder / "figures"),
        **_claims([replication_file] if replication_file else judged, folder, subject),
        "bench": timings,
        "timings": list(contents.timing_rows(timings, link)),
        "unmeasured": contents.unmeasured(timings),
        "folder": folder,
        "written": partial(_written, folder),
        "link": link,
    }
    with writing("--out", out):
        for page in PAGES:
            text = render(f"site/{page}", page=page, **values)
            write_text(out / page, _without_places(text, [*read_from, bench, out]))
    there = [table for table in filled.values() if not isinstance(table, str)]
    remarks = {
        "files that are none": len(broken),
        "unreadable files of benchmarks": len(timings.broken),
        "numbers of tables missing": sum((table["status"] == "missing").sum() for table in there),
    }
    text = "".join(f", {count} {what}" for what, count in remarks.items() if count)
    print(f"{values['subject']}: {len(rows)} records{text}")
    print(f"written: {out / 'index.html'}")
    return status


def _claims(paths: Sequence[Path], folder: Path, subject: FigurePlans) -> dict[str, object]:
    """Return what pages show of claims: the verdicts in one of some files, and the ledger's."""
    ledger, picture = folder / "claims.json", folder / "replication.png"
    verdicts, judged = contents.read_verdicts(paths, subject.profile)
    counts = contents.read(ledger, contents.fields("counts")) if ledger.is_file() else None
    if subject.own:
        verdicts = f"Claims are judged on all models of a profile, not on {subject.own} alone."
    return {
        "verdicts": verdicts,
        "judged": judged,
        "contrasts": contents.contrast_rows,
        "counts": counts,
        "ledger": ledger.with_suffix(".html"),
        "picture": picture if picture.is_file() else None,
    }


def _written(folder: Path, stem: str) -> list[Path]:
    """Return the files of a table or a figure that are there."""
    paths = (folder / f"{stem}.{suffix}" for suffix in _SUFFIXES)
    return [path for path in paths if path.is_file()]


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

    A place below the working directory is named from there, any other by its last part alone.
    """
    here, names = Path.cwd(), dict[str, str]()
    for place in places:
        for form in (place.absolute(), place.resolve()):
            inside = form.is_relative_to(here)
            name = form.relative_to(here).as_posix() if inside else f"…/{form.name}"
            if form.name:  # not the root, which is above all
                names[escape(form.as_posix())] = escape(name)
    longest_first = sorted(names, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w./…-])({'|'.join(map(re.escape, longest_first))})(?![\w.-])")
    return pattern.sub(lambda match: names[match[1]], page)


def _write_parts(subject: FigurePlans, out: str, bench: str) -> int:
    """Write tables, figures, and of a profile verdicts and claims; return the highest status."""
    words = [out, *subject.overrides]
    judges = [partial(replicate.main, words), partial(claims.main, [bench, *words])]
    beside = [
        _start(*([] if subject.own else judges)),
        _start(partial(figures.main, ["all", "--formats=svg", bench, *words])),
    ]
    _write(partial(tables.main, ["all", bench, *words]))
    return max(map(_ended, beside))


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
