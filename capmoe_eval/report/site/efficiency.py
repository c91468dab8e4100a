"""The page of efficiency, from the files of benchmarks."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from capmoe_eval.experiment.timings.names import EVALUATIONS, bench_command, evaluation_command
from capmoe_eval.experiment.timings.studies import STUDIES
from capmoe_eval.report.site import page
from capmoe_eval.report.site.blocks import (
    Block,
    DataCell,
    DataRow,
    DataTable,
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
from capmoe_eval.report.site.inventory import Inventory
from capmoe_eval.report.site.page import Address, missing
from capmoe_eval.report.templates import ABSENT

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.schema import Evaluation, Study

_STUDIES: Final = (
    *("Study", "Kind", "File", "Models and ranks", "Sizes", "Machine"),
    *("Error of the emulation", "Date"),
)
_TARGETS: Final = ("Benchmark", "What", "Reached", "Quartiles", "Target", "Met", "Machine")


def efficiency_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all files of benchmarks."""
    bench = inventory.bench
    order = [*STUDIES, None]
    studies = sorted(bench.studies, key=lambda s: (order.index(s.study), s.emulated, s.path.name))
    present = {study.study for study in studies}
    # Without a file the tables page has the table all the same, with the command.
    figures = link(address.to(page.FIGURES), "the figures")
    table = link(f"{address.to(page.TABLES)}#table10", "Table 10")
    lead = (
        "Speedup of a capacity under expert parallelism, with random weights and skewed routing; "
        "what came out is in "
    )
    speedups: list[Block] = [Prose(joined([lead, figures, " and ", table, "."], ""))]
    notes = dict.fromkeys(study.note for study in studies if study.emulated and study.note)
    if any(study.emulated for study in studies):
        emulation = " ".join(f"{n.removeprefix('EMULATED: ').rstrip('.')}." for n in notes)
        text = f": {emulation} No emulation confirms or refutes a speedup that the paper prints."
        speedups.append(Notice(joined([element("strong", "EMULATED"), text], "")))
    if studies:
        rows = [_study(study, address) for study in studies]
        speedups.append(DataTable("Files of studies", _STUDIES, [rows]))
    commands = [
        f"{bench_command(n)}  # {about}" for n, about in STUDIES.items() if n not in present
    ]
    speedups += missing("study", "studies", commands)
    evaluation: list[Block] = [
        Prose("Both sides of a ratio were measured alternately in one run on one machine.")
    ]
    for file in bench.evaluations:
        if file.rehearsal:
            name = element("strong", link(address.to_file(file.path), file.name))
            evaluation.append(Notice(joined([name, f": {file.rehearsal}."], "")))
    if bench.evaluations:
        parts = [_targets(file, address) for file in bench.evaluations]
        evaluation.append(DataTable("Targets of the evaluation", _TARGETS, parts))
    present = {file.name for file in bench.evaluations}
    commands = [
        f"{evaluation_command(n)}  # {about}"
        for n, about in EVALUATIONS.items()
        if n not in present
    ]
    evaluation += missing("benchmark", "benchmarks", commands)
    blocks = page.left_out(bench.broken, "is not whole, and", "are not whole, and")
    blocks += [
        Section("Expert parallelism", speedups),
        Section("The evaluation itself", evaluation),
    ]
    return page.render_page(address, "Efficiency", inventory.profile, blocks)


def _study(study: Study, address: Address) -> DataRow:
    about = element("small", STUDIES[study.study] if study.study else "asked for by hand")
    models: dict[str, dict[str, None]] = {}
    for run in study.runs:
        models.setdefault(run.title, {})[f"{run.ranks} × {run.experts_per_rank}"] = None
    sizes = ["full widths" if study.scale == 1 else f"widths 1/{study.scale:g}"]
    if study.batch_divisor and study.batch_divisor != 1:
        sizes.append(f"batches 1/{study.batch_divisor:g}")
    texts = [
        badge("EMULATED" if study.emulated else "measured"),
        link(address.to_file(study.path), study.path.name),
        "; ".join(f"{model} {', '.join(placed)}" for model, placed in models.items()),
        ", ".join([*sizes, study.dtype, f"{study.repeats} rounds"]),
        ", ".join([str(study.machine), *([study.backend] if study.backend else [])]),
        _errors(study),
        study.date[:10],
    ]
    name = joined([study.study or "a single layer", about], "<br>")
    return DataRow([head(name), *map(DataCell, texts)], id=study.path.stem)


def _errors(study: Study) -> str:
    """Say by how much the emulation misses what was measured, where that was tried."""
    if not study.errors:
        return "not compared in this file" if study.emulated else ABSENT
    texts = []
    for key in ("total", "speedup"):
        shares = [100 * errors[key] for errors in study.errors]
        worst = f"{max(shares, key=abs):+.0f} %".replace("-", "−")
        texts.append(f"{key}: median {statistics.median(map(abs, shares)):.0f} %, at worst {worst}")
    return "; ".join(texts)


def _targets(file: Evaluation, address: Address) -> list[DataRow]:
    rows = []
    for target in file.targets:
        ratio, met = target.ratio, ABSENT
        if file.rehearsal:
            met = badge("REHEARSAL")
        elif target.met is not None:
            met = badge("met" if target.met else "missed")
        name = joined([link(address.to_file(file.path), file.name), f": {target.name}"], "")
        cells = [
            number(target.shown(ratio.median), ratio.median),
            number(f"{target.shown(ratio.low)}–{target.shown(ratio.high)}", ratio.low),
            number(target.goal or ABSENT, target.target),
        ]
        texts = map(DataCell, (met, str(file.machine)))
        rows.append(DataRow([head(name), DataCell(target.what), *cells, *texts]))
    return rows
