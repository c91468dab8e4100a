"""``python -m capmoe_eval.tables table2 profile=tiny``: a table from finished records.

The records of a table are those of the cells of its experiment, no others: an evaluation with other
settings that happens to lie in the results directory is not mixed in. Needs no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from capmoe_eval.application import run_command
from capmoe_eval.configuration import Plan, config_directory, load_option, plans, register_resolvers
from capmoe_eval.errors import UsageError
from capmoe_eval.record import Record, read_record
from capmoe_eval.report import (
    LAYOUTS,
    Measured,
    ModelSlot,
    Table,
    fill,
    get_layout,
    published_table,
    to_markdown,
    write,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Render a table and exit: 0 rendered, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m capmoe_eval.tables",
        description="Render a table of the paper from finished results, or as it was published.",
    )
    names = sorted({layout.name for layout in LAYOUTS})
    parser.add_argument("name", metavar="TABLE", help=f"one of {', '.join(names)}")
    parser.add_argument(
        "--published",
        metavar="VERSION",
        help="render the printed numbers instead: v1 (arXiv) or v2 (ICLR 2026)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("reports"), help="directory (default: reports)"
    )
    parser.add_argument(
        "overrides", nargs="*", help="as for python -m capmoe_eval, e.g. profile=paper limit=100"
    )
    given = parser.parse_args(arguments)

    def render() -> int:
        if given.published:
            table, folder = published_table(given.name, given.published), "published"
        else:
            table, folder = measured_table(given.name, given.overrides)
        paths = write(table, given.out / folder)
        print(to_markdown(table))
        print("written: " + ", ".join(str(path) for path in paths))
        return 0

    sys.exit(run_command(render))


def measured_table(name: str, overrides: Sequence[str] = ()) -> tuple[Table, str]:
    """Return a table filled with this suite's own results, and the name of its profile.

    Args:
        name: A table whose experiment is in ``conf/experiment/``.
        overrides: What was said on the command line of the run.

    Raises:
        UsageError: For a table or an override that does not exist.
    """
    layout = get_layout(name)
    config = _compose([f"experiment={name}", *overrides])
    planned = plans(config)
    records, broken = _finished(planned)
    profile = config.profile
    models = [load_option("model", key) for key in config.grid.model]
    slots = [ModelSlot(model.name, model.title, float(model.gamma)) for model in models]
    fills = [word for word in overrides if not word.startswith(("grid.", "profile="))]
    table = fill(layout, slots, Measured(records, overrides=fills, seeds=list(profile.seeds)))
    notes = {f"{plan.cell.model.name}: {plan.note}." for plan in planned if plan.note}
    return dataclasses.replace(table, notes=(*table.notes, *sorted(notes), *broken)), profile.name


def _compose(overrides: Sequence[str]) -> DictConfig:
    register_resolvers()
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        config: DictConfig = compose("config", overrides=list(overrides))
    return config


def _finished(planned: Sequence[Plan]) -> tuple[list[Record], list[str]]:
    """Return the records that are there, and a note for each that cannot be read."""
    records, broken = [], []
    for plan in planned:
        if plan.path.exists():
            try:
                records.append(read_record(plan.path))
            except UsageError as error:
                broken.append(f"left out: {error}")
    return records, broken


if __name__ == "__main__":
    main()
