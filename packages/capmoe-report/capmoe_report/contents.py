"""Gather what a report shows: finished results, and what other commands wrote of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

from capmoe_bench.timings import (
    EVALUATIONS,
    STUDIES,
    bench_command,
    evaluation_command,
    kind_text,
    targets,
)
from capmoe_eval.errors import UsageError, field_problem
from capmoe_eval.experiment.commands import cell_command
from capmoe_eval.experiment.configuration import CellPlan
from capmoe_eval.experiment.files import read_bytes
from capmoe_eval.experiment.names import gamma_column, score_text, score_unit
from capmoe_eval.experiment.packs import file_with
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.selection import planned
from capmoe_eval.paper.layout import TABLES, Layout
from capmoe_eval.report.figures.catalogue import figures
from capmoe_eval.report.tables.filled import measured_table
from capmoe_eval.report.tables.table import commands
from capmoe_eval.report.texts import ABSENT, shown
from hydra.errors import HydraException
from markupsafe import Markup
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from capmoe_report.records import seen_from
from capmoe_report.verdicts import VerdictFile

if TYPE_CHECKING:
    import pandas as pd
    from capmoe_bench.timings import Bench

    from capmoe_report.verdicts import JudgedClaim

T = TypeVar("T")

COLUMNS: Final = (
    *("model", "task", "method", "gamma", "score", "±", "n", "enforced", "examined (%)"),
    *("dropped (%)", "peak before", "peak after", "computed", "record", "compute it again"),
)
"""The headings of the records; the first four are those that a link chooses by."""
_AGAIN: Final = "again"
"""The directory of a record that is computed again, so that the first one stays."""


def attempt(make: Callable[[], T]) -> T | str:
    """Return what a function makes, or why it cannot, in one line."""
    try:
        return make()
    except (UsageError, HydraException, OmegaConfBaseException) as error:
        return " ".join(str(error).split())


def read(path: Path, parse: Callable[[bytes], T]) -> T | str:
    """Return what a file of another command has, or why it cannot be read, in one line."""
    try:
        return parse(read_bytes(path))
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = field_problem(error) if isinstance(error, ValidationError) else error
        return f"{path}: cannot be read ({reason})"


def fields(*names: str) -> Callable[[bytes], dict[str, Any]]:
    """Return what reads these fields of a JSON object."""
    return lambda data: {name: json.loads(data)[name] for name in names}


def linker(out: Path) -> Callable[[Path], str]:
    """Return what gives the address of a file as seen from a directory."""
    return functools.cache(lambda path: quote(seen_from(out, path)))


def table_plans(overrides: Sequence[str]) -> list[CellPlan]:
    """Return the plans of all tables that a command line can have."""
    parts = (
        attempt(functools.partial(planned, [f"experiment={layout.key}", *overrides]))
        for layout in TABLES
        if isinstance(layout, Layout)
    )
    return [plan for part in parts if not isinstance(part, str) for plan in part]


def filled_tables(overrides: Sequence[str], bench: Path) -> dict[str, pd.DataFrame | str]:
    """Return every table by its name, or why it cannot be filled."""
    fill = functools.partial(measured_table, overrides=overrides, bench=bench)
    return {layout.key: attempt(functools.partial(fill, layout.key)) for layout in TABLES}


def rows_of(records: Iterable[Record], link: Callable[[Path], str]) -> Iterator[dict[str, Any]]:
    """Yield of each record the cells of its row, by :data:`COLUMNS`, and the name of the row."""
    for record in records:
        metric, load, proofs = record.cell.task.metric, record.load, record.proofs
        passed = sum(proof.passed is True for _, proof, _ in proofs.recorded())
        failed = f"failed: {', '.join(proofs.broken)}" if proofs.broken else ""
        made = record.provenance
        origin = made.date[:10], (made.git_revision or "")[:8], made.device.get("name")
        cells = [
            *(record.model, record.task, record.method),
            gamma_column(record.method, record.cell.method.factor),
            f"{score_text(metric, record.value)} {score_unit(metric)}",
            ABSENT if record.stderr is None else score_text(metric, record.stderr),
            str(record.n),
            failed or f"{passed} passed",
            *(shown(share, "{:.1f}", 100) for share in (proofs.examined, load.drop_rate)),
            *(shown(peak, "{:.2f}") for peak in (load.peak_before, load.peak_after)),
            ", ".join(map(str, filter(None, origin))),
            Markup('<a href="{}">{}</a>').format(link(file_with(record.path)), record.path.stem),
            cell_command(record.cell, _AGAIN) or ABSENT,
        ]
        yield {"id": record.path.stem, "cells": cells, "failed": failed}


def table_rows(
    tables: Mapping[str, pd.DataFrame | str], overrides: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    """Yield of each table its name, how many numbers are there and missing, and what fills it."""
    for name, table in tables.items():
        to_table = Markup('<a href="tables.html#{}">{}</a>').format(name, name)
        if isinstance(table, str):
            yield to_table, ABSENT, ABSENT, table
        else:
            counts = table["status"].value_counts()
            there, missing = counts.get("measured", 0), counts.get("missing", 0)
            words = " ".join(["capmoe-eval run", f"experiment={name}", *overrides])
            of_rows = commands(table)
            command = words if len(of_rows) > 1 else "".join(of_rows)
            yield to_table, f"{there:,}", f"{missing:,}", command


def timing_rows(bench: Bench, link: Callable[[Path], str]) -> Iterator[tuple[str, ...]]:
    """Yield file, subject, kind, machine, date and what it says, of each file of benchmarks."""
    anchor = Markup('<a href="{}">{}</a>')
    for path, times in bench.timings.groupby("path", sort=False):
        first, place = times.iloc[0], Path(str(path))
        about = STUDIES[first["study"]] if first["study"] else "a layer that was asked for by hand"
        ranks = times["model"] + ", " + times["ranks"].astype(str) + " ranks"
        file, models = anchor.format(link(place), place.stem), ", ".join(ranks.unique())
        kind, machine = kind_text(first["kind"]), first["machine"]
        yield file, about, kind, machine, first["date"][:10], models
    for name, content in bench.evaluations.items():
        rehearsal, texts = content.get("rehearsal"), []
        for target in targets(content):
            goal = f" ({target.goal}: {'met' if target.met else 'missed'})" if target.goal else ""
            verdict = "" if rehearsal else goal
            texts.append(f"{target.name} {target.shown(target.ratio.median)}{verdict}")
        file = anchor.format(link(bench.folder / f"{name}.json"), name)
        machine, kind = "{device}: {name}".format_map(content["machine"]), rehearsal or "measured"
        yield file, EVALUATIONS[name], kind, machine, content["date"][:10], "; ".join(texts)


def unmeasured(bench: Bench) -> list[str]:
    """Return the commands of the studies and benchmarks that have no file."""
    studies = STUDIES.keys() - set(bench.timings["study"])
    files = EVALUATIONS.keys() - bench.evaluations.keys()
    return [
        *(bench_command(name) for name in STUDIES if name in studies),
        *(evaluation_command(name) for name in EVALUATIONS if name in files),
    ]


def contrast_rows(claim: JudgedClaim) -> Iterator[tuple[str, ...]]:
    """Yield what was compared for a claim, effect, interval, p, verdict and effects by model."""
    for contrast in claim.contrasts:
        interval = ABSENT
        if contrast.low is not None and contrast.high is not None:
            interval = f"[{shown(contrast.low, '{:+.2f}')}, {shown(contrast.high, '{:+.2f}')}]"
        unit = "" if contrast.unit == "points" else f" {contrast.unit}"
        yield (
            contrast.label,
            f"{shown(contrast.effect, '{:+.2f}')}{unit}".rstrip(),
            interval,
            shown(contrast.p, "{:.4f}"),
            contrast.verdict,
            ", ".join(f"{model} {shown(x, '{:+.2f}')}" for model, x in contrast.models.items()),
        )


def figure_texts(folder: Path) -> dict[str, dict[str, Any] | str]:
    """Return the words of each figure of a directory, in the catalogue's order, then the others."""
    names = {path.stem for suffix in ("json", "svg") for path in folder.glob(f"*.{suffix}")}
    ordered = [*(name for name in figures() if name in names), *sorted(names - figures().keys())]
    words = fields("title", "place", "caption", "notes", "missing")
    return {name: read(folder / f"{name}.json", words) for name in ordered}


def read_verdicts(paths: Iterable[Path], profile: str) -> tuple[VerdictFile | str, list[Path]]:
    """Return the verdicts on most records of a profile, or why there are none, and their path."""

    def parse(data: bytes) -> VerdictFile:
        file = VerdictFile.model_validate_json(data)
        if file.profile != profile:
            raise ValueError(f"verdicts of profile {file.profile}, not of {profile}")
        return file

    files = {path: read(path, parse) for path in paths if path.is_file()}
    counts = {p: -1 if isinstance(file, str) else file.records for p, file in files.items()}
    path = max(counts, key=counts.__getitem__, default=None)
    if path is None:
        return f"Not judged yet: capmoe-eval replicate profile={profile}", []
    return files[path], [path]
