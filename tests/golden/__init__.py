"""What the committed records give today: tables, effects, verdicts, and what figures draw.

``python -m tests.golden`` writes them. A file that differs afterwards is a finding: its commit says
which numbers changed, and why.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pandas as pd
from capmoe_report.claims import evidence_of
from capmoe_report.contrasts import Contrast, grouping
from capmoe_report.effects import by_family
from capmoe_report.evidence import Evidence
from capmoe_report.judge import findings_of, judge, paper_claims, replication_claims
from capmoe_report.verdicts import Finding

from capmoe_eval.paper.layout import PAPER_TABLES, TABLES, WorkloadLayout
from capmoe_eval.report.figures.catalogue import figures as all_figures
from capmoe_eval.report.figures.sources import FigurePlans, gather
from capmoe_eval.report.figures.write import images_of, measured
from capmoe_eval.report.tables.filled import measured_table, published_table
from tests.project import ROOT

FOLDER: Final = Path(__file__).parent
_RESULTS: Final = ROOT / "results/zoo"
_BENCH: Final = ROOT / "results/bench"
_WORDS: Final = ("profile=zoo", f"results_dir={_RESULTS}")
_NUMBERS: Final = (
    *("value", "stderr", "truncated", "effect", "p", "corrected", "low", "high"),
    *("published", "difference", "z"),
)


@functools.cache
def _evidence() -> Evidence:
    """The material of the claims: all records of profile zoo."""
    evidence = evidence_of(_RESULTS, "zoo", _BENCH)
    assert not evidence.broken
    return evidence


def tables() -> Iterator[dict[str, Any]]:
    """Every cell of every table, measured and as printed: how it is shown, and its numbers."""
    for layout in TABLES:
        if not isinstance(layout, WorkloadLayout):
            yield from _measured(layout.key)
    for printed in PAPER_TABLES:
        yield from _cells(published_table(printed.name, printed.version))


def _measured(key: str) -> Iterator[dict[str, Any]]:
    yield from _cells(measured_table(key, _WORDS, _BENCH))


def _cells(table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    for cell in table.to_dict("records"):
        shown = cell["text"]
        if cell["status"] == "measured":
            shown = f"{cell['value']:.{table.attrs['decimals']}f}{cell['mark']}"
            shown += "§" * (cell["truncated"] > 0)
        labels = [cell[name] for name in table.attrs["labels"]]
        yield {
            "table": table.attrs["name"],
            "line": cell["line"] + 1,
            "row": " | ".join(labels),
            "column": cell["column"],
            "shown": f"**{shown}**" if cell["best"] else shown,
            **{name: cell[name] for name in _NUMBERS},
            "records": len(cell["records"]) if cell["status"] == "measured" else None,
        }


def effects() -> Iterator[dict[str, Any]]:
    """Every contrast of the replication and the ledger: effect, intervals, p values, families."""
    evidence = _evidence()
    for contrast in contrasts().values():
        effect = evidence.effect(contrast.first, contrast.second, contrast.model)
        row: dict[str, Any] = {
            "contrast": str(contrast),
            "sides": _sides(contrast),
            "expect": str(contrast.expect),
            "points": effect.points,
            "documents": effect.documents,
            "records": len(effect.records),
            "unpaired": len(effect.unpaired),
        }
        if effect.points is not None:
            depth = contrast.expect.depth(effect.points)
            row |= dict(zip(("low", "high"), effect.interval(), strict=True))
            if effect.between is not None:
                row |= zip(("wide_low", "wide_high"), effect.interval(wide=True), strict=True)
            row |= {"p": effect.p(depth), "p_families": effect.p(depth, wide=True)}
            row |= {"worth": effect.worth, "detectable": effect.detectable}
            families = by_family(effect.models)
            row["families"] = _text({name: round(value, 6) for name, value in families.items()})
            row["models"] = _text({name: round(v, 6) for name, v in effect.models.items()})
            row["tasks"] = _text({name: sorted(tasks) for name, tasks in effect.tasks.items()})
        yield row


def contrasts() -> dict[tuple[str, str], Contrast]:
    """Every contrast that a claim of the replication or of the ledger names, by what it asks."""
    named = [c for claim in (*replication_claims(), *paper_claims()) for c in claim.contrasts]
    return {(_sides(contrast), str(contrast.expect)): contrast for contrast in named}


def _sides(contrast: Contrast) -> str:
    sides = [side.model_dump(exclude_defaults=True) for side in (contrast.first, contrast.second)]
    return _text({"a": sides[0], "b": sides[1], "model": contrast.model})


def verdicts() -> Iterator[dict[str, Any]]:
    """Every verdict and every finding behind it, of the replication and the ledger."""
    evidence = _evidence()
    yield from _judged("replication", judge(evidence, replication_claims()))
    for row in grouping(evidence):
        key = {"of": "grouping", "claim": row.label}
        distance = None if row.distance is None else round(row.distance, 5)
        yield key | {"effect": distance, "unit": "points from Table 1"}
        yield from (key | _finding(finding) for finding in row.gaps)
    yield from _judged("ledger", judge(evidence, paper_claims()))


def _judged(of: str, frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """A row for each claim, of the ledger for each check, and for each finding."""
    for claim, rows in frame.groupby("claim", sort=False):
        key = {"of": of, "claim": claim}
        yield key | {"verdict": rows["conclusion"].iloc[0], "scope": rows["of"].iloc[0]}
        for check, finding in zip(rows["check"], findings_of(rows), strict=True):
            source = {"source": check} if of == "ledger" else {}
            if finding.label and (of == "replication" or finding.effect is not None):
                yield key | source | _finding(finding)
            elif source and not finding.label:
                yield key | source | {"verdict": finding.verdict.name.lower()}


def _finding(finding: Finding) -> dict[str, Any]:
    written = finding.model_dump(mode="json")
    low_high, bounds = written["wide"] or (None, None), written["bounds"] or (None, None)
    return {
        "finding": finding.label,
        **{name: written[name] for name in ("verdict", "unit")},
        **{name: written[name] for name in ("effect", "low", "high", "p", "documents")},
        **dict(zip(("wide_low", "wide_high"), low_high, strict=True)),
        **dict(zip(("at_least", "at_most"), bounds, strict=True)),
        "conditional": finding.conditional,
        "models": _text(written["models"]),
    }


def figures(package: str = "capmoe_eval") -> Iterator[dict[str, Any]]:
    """Every number that a figure of a package draws: the rows of its data."""
    plans = FigurePlans(_WORDS)
    for spec in all_figures().values():
        if spec.package.startswith(package):
            rows = measured(spec, gather(spec, plans, _BENCH)).round(6)
            yield from ({"figure": spec.name} | row for row in rows.to_dict("records"))


def drawn(file: Path) -> list[str]:
    """Draw every figure of a golden file from its numbers; their names."""
    cells = pd.read_csv(file, dtype=str)
    for name, rows in cells.groupby("figure", sort=False):
        # Read by itself, a figure's column of whole numbers or of truth values is one again.
        text = rows.dropna(axis=1, how="all").to_csv(index=False)
        spec = all_figures()[str(name)]
        image = images_of(functools.partial(spec.draw, pd.read_csv(io.StringIO(text))), ["svg"])
        assert image["svg"].startswith(b"<?xml")
    return [*cells["figure"].unique()]


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def framed(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """What the records give of a kind, as it is read from its file."""
    text = pd.DataFrame(list(rows)).to_csv(index=False, float_format="%.12g")
    return read(io.StringIO(text))


def read(file: Path | io.StringIO) -> pd.DataFrame:
    """A golden file; a cell that has nothing is an empty text, or NaN among numbers."""
    cells = pd.read_csv(file, keep_default_na=False, dtype=str)
    numbers = [name for name in cells if not cells[name].map(_is_text).any()]
    return cells.assign(**{name: pd.to_numeric(cells[name]) for name in numbers})


def _is_text(cell: str) -> bool:
    try:
        float(cell or "nan")
    except ValueError:
        return True
    return False


KINDS: Final[Mapping[str, Callable[[], Iterator[dict[str, Any]]]]] = {
    kind.__name__: kind for kind in (tables, effects, verdicts, figures)
}
FILES: Final[Mapping[Path, Callable[[], Iterator[dict[str, Any]]]]] = {
    **{FOLDER / f"{name}.csv": kind for name, kind in KINDS.items()},
    ROOT / "packages/capmoe-methods/tests/figures.csv": functools.partial(
        figures, "capmoe_methods"
    ),
    ROOT / "packages/capmoe-bench/tests/figures.csv": functools.partial(figures, "capmoe_bench"),
    ROOT / "packages/capmoe-bench/tests/table10.csv": functools.partial(_measured, "table10"),
}
