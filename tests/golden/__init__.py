"""What the committed records give today: tables, and what figures draw.

``python -m tests.golden`` writes them; effects and verdicts are in ``packages/capmoe-report``. A
file that differs afterwards is a finding: its commit says which numbers changed, and why.
"""

import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pandas as pd

from capmoe_eval.paper.layout import PAPER_TABLES, TABLES, WorkloadLayout
from capmoe_eval.report.figures.catalogue import figures as all_figures
from capmoe_eval.report.figures.command import images_of, measured
from capmoe_eval.report.figures.sources import FigurePlans, gather
from capmoe_eval.report.tables.filled import measured_table, published_table
from tests.project import ROOT

FOLDER: Final = Path(__file__).parent
RESULTS: Final = ROOT / "results/zoo"
BENCH: Final = ROOT / "results/bench"
_WORDS: Final = ("profile=zoo", f"results_dir={RESULTS}")
_NUMBERS: Final = (
    *("value", "stderr", "truncated", "effect", "p", "corrected", "low", "high"),
    *("published", "difference", "z"),
)


def tables() -> Iterator[dict[str, Any]]:
    """Every cell of every table, measured and as printed: how it is shown, and its numbers."""
    for layout in TABLES:
        if not isinstance(layout, WorkloadLayout):
            yield from _measured(layout.key)
    for printed in PAPER_TABLES:
        yield from _cells(published_table(printed.name, printed.version))


def _measured(key: str) -> Iterator[dict[str, Any]]:
    yield from _cells(measured_table(key, _WORDS, BENCH))


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


def figures(package: str = "capmoe_eval") -> Iterator[dict[str, Any]]:
    """Every number that a figure of a package draws: the rows of its data."""
    plans = FigurePlans(_WORDS)
    for spec in all_figures().values():
        if spec.package.startswith(package):
            rows = measured(spec, gather(spec, plans, BENCH)).round(6)
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


def framed(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """What the records give of a kind, as it is read from its file."""
    text = pd.DataFrame(list(rows)).to_csv(index=False, float_format="%.12g")
    return read(io.StringIO(text))


def read(file: Path | io.StringIO) -> pd.DataFrame:
    """A golden file; a cell that has nothing is NaN."""
    return pd.read_csv(file, low_memory=False)


KINDS: Final[Mapping[str, Callable[[], Iterator[dict[str, Any]]]]] = {
    kind.__name__: kind for kind in (tables, figures)
}
FILES: Final[Mapping[Path, Callable[[], Iterator[dict[str, Any]]]]] = {
    **{FOLDER / f"{name}.csv": kind for name, kind in KINDS.items()},
    ROOT / "packages/capmoe-methods/tests/figures.csv": functools.partial(
        figures, "capmoe_methods"
    ),
    ROOT / "packages/capmoe-bench/tests/figures.csv": functools.partial(figures, "capmoe_bench"),
    ROOT / "packages/capmoe-bench/tests/table10.csv": functools.partial(_measured, "table10"),
}


def write(files: Mapping[Path, Callable[[], Iterator[dict[str, Any]]]]) -> None:
    """Write the files that differ, and name them."""
    for path, rows in files.items():
        text = framed(rows()).to_csv(index=False, float_format="%.12g")
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"written: {path}")
