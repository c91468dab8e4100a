"""The page of efficiency: expert parallelism, and the targets of the evaluation itself."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from capmoe_eval.experiment.timings.names import EVALUATIONS, bench_command, evaluation_command
from capmoe_eval.experiment.timings.studies import STUDIES
from capmoe_eval.report.site import page
from capmoe_eval.report.site.inventory import Inventory
from capmoe_eval.report.site.page import Address, render_page
from capmoe_eval.report.templates.texts import ABSENT

if TYPE_CHECKING:
    from capmoe_eval.experiment.timings.schema import Study


def efficiency_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all files of benchmarks."""
    bench = inventory.bench
    order = [*STUDIES, None]
    studies = sorted(bench.studies, key=lambda s: (order.index(s.study), s.emulated, s.path.name))
    present = {study.study for study in studies}
    measured = {evaluation.name for evaluation in bench.evaluations}
    return render_page(
        "efficiency",
        address,
        "Efficiency",
        inventory.profile,
        broken=bench.broken,
        figures=address.to(page.FIGURES),
        # Without a file the tables page has the table all the same, with the command.
        table=f"{address.to(page.TABLES)}#table10",
        emulation=_emulation(studies) if any(study.emulated for study in studies) else None,
        studies=[
            {
                "study": study,
                "about": STUDIES[study.study] if study.study else "asked for by hand",
                "file": address.link_to_file(study.path, study.path.name),
                "models": _models(study),
                "errors": _errors(study),
            }
            for study in studies
        ],
        missing_studies=[
            f"{bench_command(name)}  # {about}"
            for name, about in STUDIES.items()
            if name not in present
        ],
        evaluations=[
            (evaluation, address.link_to_file(evaluation.path, evaluation.name))
            for evaluation in bench.evaluations
        ],
        missing_benchmarks=[
            f"{evaluation_command(name)}  # {about}"
            for name, about in EVALUATIONS.items()
            if name not in measured
        ],
    )


def _emulation(found: Sequence[Study]) -> str:
    """Return what the emulations say of themselves, each once."""
    notes = dict.fromkeys(study.note for study in found if study.note)
    return " ".join(f"{note.removeprefix('EMULATED: ').rstrip('.')}." for note in notes)


def _models(study: Study) -> str:
    """Return each model with its numbers of ranks and of experts on each."""
    models: dict[str, dict[str, None]] = {}
    for run in study.runs:
        models.setdefault(run.title, {})[f"{run.ranks} × {run.experts_per_rank}"] = None
    return "; ".join(f"{model} {', '.join(placed)}" for model, placed in models.items())


def _errors(study: Study) -> str:
    """Say by how much the emulation misses what was measured, where that was tried."""
    if not study.errors:
        return "not compared in this file" if study.emulated else ABSENT
    told = []
    for key in ("total", "speedup"):
        shares = [100 * errors[key] for errors in study.errors]
        worst = f"{max(shares, key=abs):+.0f} %".replace("-", "−")
        told.append(f"{key}: median {statistics.median(map(abs, shares)):.0f} %, at worst {worst}")
    return "; ".join(told)
