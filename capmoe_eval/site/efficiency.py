"""The page of efficiency: expert parallelism, and the targets of the evaluation itself."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from capmoe_eval.efficiency import EVALUATIONS, STUDIES, bench_command, evaluation_command
from capmoe_eval.site import page
from capmoe_eval.site.inventory import Inventory
from capmoe_eval.site.loose import ABSENT
from capmoe_eval.site.markup import Child, Markup, element
from capmoe_eval.site.page import Address, Heading, badge, notice

if TYPE_CHECKING:
    from capmoe_eval.efficiency.schema import Evaluation, Study

_STUDIES = (
    Heading("Study"),
    Heading("Kind"),
    Heading("File"),
    Heading("Models and ranks"),
    Heading("Sizes"),
    Heading("Machine"),
    Heading("Error of the emulation"),
    Heading("Date"),
)
_TARGETS = (
    Heading("Benchmark"),
    Heading("What"),
    Heading("Reached", numeric=True),
    Heading("Quartiles", numeric=True),
    Heading("Target", numeric=True),
    Heading("Met"),
    Heading("Machine"),
)


def efficiency_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all files of benchmarks."""
    return page.frame(
        address,
        "Efficiency",
        inventory.profile,
        _broken(inventory),
        _studies(inventory, address),
        _evaluations(inventory, address),
    )


def _broken(inventory: Inventory) -> Markup | None:
    broken = inventory.bench.broken
    if not broken:
        return None
    told = "1 file is" if len(broken) == 1 else f"{len(broken)} files are"
    return notice(
        element("p", element("strong", f"{told} not whole, and left out everywhere:")),
        element("ul", [element("li", line) for line in broken]),
    )


def _studies(inventory: Inventory, address: Address) -> Markup:
    bench = inventory.bench
    order = [*STUDIES, None]
    found = sorted(bench.studies, key=lambda s: (order.index(s.study), s.emulated, s.path.name))
    figures = element("a", "the figures", href=address.to(page.FIGURES))
    # Without a file the tables page has the table all the same, with the command.
    table = element("a", "Table 10", href=f"{address.to(page.TABLES)}#table10")
    told: list[Child] = [
        element(
            "p",
            "Speedup of a capacity under expert parallelism, with random weights and skewed "
            "routing; what came out is in ",
            figures,
            " and ",
            table,
            ".",
        )
    ]
    if any(study.emulated for study in found):
        told.append(
            notice(
                element("p", element("strong", "EMULATED"), ": ", _emulation(found)),
                element("p", "No emulation confirms or refutes a speedup that the paper prints."),
            )
        )
    if found:
        rows = [_study(study, address) for study in found]
        told.append(page.sortable("Files of studies", _STUDIES, [page.rows(rows)]))
    there = {study.study for study in found}
    lacking = [name for name in STUDIES if name not in there]
    told.append(_missing("study", [(bench_command(name), STUDIES[name]) for name in lacking]))
    return element("section", element("h2", "Expert parallelism"), told)


def _emulation(found: Sequence[Study]) -> str:
    """Return what the emulations say of themselves, each once."""
    notes = dict.fromkeys(study.note for study in found if study.note)
    return " ".join(f"{note.removeprefix('EMULATED: ').rstrip('.')}." for note in notes)


def _study(study: Study, address: Address) -> Markup:
    kind = "EMULATED" if study.emulated else "measured"
    name = study.study or "a single layer"
    about = STUDIES[study.study] if study.study else "asked for by hand"
    link = element("a", study.path.name, href=address.to_file(study.path))
    widths = "full widths" if study.scale == 1 else f"widths 1/{study.scale:g}"
    sizes = [widths, study.dtype, f"{study.repeats} rounds"]
    if study.batch_divisor and study.batch_divisor != 1:
        sizes.insert(1, f"batches 1/{study.batch_divisor:g}")
    backend = f", {study.backend}" if study.backend else ""
    return element(
        "tr",
        element("th", name, element("br"), element("small", about), scope="row"),
        element("td", badge(kind)),
        element("td", link),
        element("td", _models(study)),
        element("td", ", ".join(sizes)),
        element("td", f"{study.machine}{backend}"),
        element("td", errors_text(study)),
        element("td", study.date[:10]),
        id=study.path.stem,
    )


def _models(study: Study) -> str:
    """Return each model with its numbers of ranks and of experts on each."""
    models: dict[str, dict[str, None]] = {}
    for run in study.runs:
        models.setdefault(run.title, {})[f"{run.ranks} × {run.experts_per_rank}"] = None
    return "; ".join(f"{model} {', '.join(placed)}" for model, placed in models.items())


def errors_text(study: Study) -> str:
    """Say by how much the emulation misses what was measured, where that was tried."""
    if not study.errors:
        return "not compared in this file" if study.emulated else ABSENT

    def told(key: str) -> Iterator[str]:
        shares = [100 * errors[key] for errors in study.errors]
        worst = max(shares, key=abs)
        yield f"{key}: median {statistics.median(map(abs, shares)):.0f} %"
        yield f"at worst {worst:+.0f} %".replace("-", "−")

    return "; ".join(", ".join(told(key)) for key in ("total", "speedup"))


def _evaluations(inventory: Inventory, address: Address) -> Markup:
    found = inventory.bench.evaluations
    told: list[Child] = [
        element("p", "Both sides of a ratio were measured alternately in one run on one machine.")
    ]
    if found:
        bodies = [page.rows(_targets(evaluation, address)) for evaluation in found]
        told.append(page.sortable("Targets of the evaluation", _TARGETS, bodies))
    there = {evaluation.name for evaluation in found}
    lacking = [(evaluation_command(n), about) for n, about in EVALUATIONS.items() if n not in there]
    told.append(_missing("benchmark", lacking))
    return element("section", element("h2", "The evaluation itself"), told)


def _targets(evaluation: Evaluation, address: Address) -> Iterator[Markup]:
    for target in evaluation.targets:
        link = element("a", evaluation.name, href=address.to_file(evaluation.path))
        ratio = target.ratio
        yield element(
            "tr",
            element("th", link, f": {target.name}", scope="row"),
            element("td", target.what),
            _number(ratio.median, target.shown(ratio.median)),
            _number(ratio.low, f"{target.shown(ratio.low)}–{target.shown(ratio.high)}"),
            _number(target.target, target.goal or ABSENT),
            element(
                "td", ABSENT if target.met is None else badge("met" if target.met else "missed")
            ),
            element("td", evaluation.machine),
        )


def _number(value: float | None, shown: str) -> Markup:
    return element("td", shown, class_="number", data_value=value)


def _missing(noun: str, lacking: Sequence[tuple[str, str]]) -> Markup | None:
    """Return the commands for what is missing."""
    if not lacking:
        return None
    count = f"1 {noun} is" if len(lacking) == 1 else f"{len(lacking)} {_plural(noun)} are"
    commands = "\n".join(f"{command}  # {about}" for command, about in lacking)
    return element(
        "details",
        element("summary", f"{count} missing: the commands that measure them"),
        element("pre", element("code", commands), tabindex="0"),
        class_="holes",
    )


def _plural(noun: str) -> str:
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
