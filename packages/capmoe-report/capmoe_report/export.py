"""The command ``export``: write the records of a results directory for other tools."""

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from capmoe_eval import load_frame
from capmoe_eval.errors import UsageError, shown, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser
from capmoe_eval.experiment.files import check_file, check_writable, whole_file, write_text
from capmoe_eval.experiment.reservations import print_warning
from capmoe_eval.experiment.results import read_results
from capmoe_eval.results.packing import directory_of


def main(arguments: Sequence[str] | None = None) -> None:
    """Export a results directory and exit: 0 written, 2 bad input."""
    parser = Parser(
        prog="capmoe-eval export",
        description="Write finished records as result files of lm-eval, or as a data frame. The "
        "results directory stays as it is.",
    )
    parser.add_argument(
        "place", metavar="results_dir=DIR", help="directory of the records, packed or not"
    )
    parser.add_argument(
        "--lm-eval",
        type=PATH,
        metavar="OUT",
        help="directory of result files of lm-eval, outside DIR, for tools that read these",
    )
    parser.add_argument(
        "--parquet", type=PATH, metavar="FILE", help="Parquet file of the data frame, for pandas"
    )
    options = parser.parse_args(arguments)

    def command() -> int:
        root, directory = directory_of(options.place), options.lm_eval
        if directory is None and options.parquet is None:
            raise UsageError("export: names nothing to write; add --lm-eval OUT or --parquet FILE")
        if directory is not None:
            # A command would take the files for broken records of a model of that name.
            if directory.resolve().is_relative_to(root.resolve()):
                raise UsageError(
                    f"--lm-eval={shown(str(directory))}: is in the results directory {root}; "
                    "choose one outside it"
                )
            check_writable("--lm-eval", directory)
        if options.parquet is not None:
            check_file("--parquet", options.parquet)
            write_parquet(root, options.parquet)
            print(f"written: {options.parquet}")
        if directory is not None:
            print(f"written: {write_lm_eval(root, directory)} files in {directory}")
        return 0

    sys.exit(run_command(command))


def write_lm_eval(root: Path, directory: Path) -> int:
    """Write each record as a result file of lm-eval's command line; return how many.

    ``<model>/results_<digest>.json`` is what lm-eval returned, with the fields that its command
    line adds. ``config.model_args`` has the method with its knobs, ``config.capmoe`` the loads. A
    record that cannot be read is told on standard error.

    Raises:
        UsageError: If there is no whole record, or a file cannot be written.
    """
    broken: list[str] = []
    records = read_results(root, broken)
    for line in broken:
        print_warning(line)
    if not records:
        raise UsageError(f"results_dir={root}: no whole record there; name one that has records")
    for record in records:
        cell, origin = record.cell, record.provenance
        settings = {"pretrained": cell.model.pretrained, "dtype": cell.model.dtype}
        settings |= {k: v for k, v in cell.method.identity().items() if v is not None}
        of_command_line = {
            "config": {
                "model": "hf" if cell.backend == "transformers" else cell.backend,
                "model_args": ",".join(f"{key}={shown(value)}" for key, value in settings.items()),
                "model_dtype": cell.model.dtype,
                "model_revision": cell.model.revision,
                "batch_size": cell.batch_size,
                "limit": cell.limit,
                "capmoe": record.content["capmoe"]["load"],
            },
            "model_name": cell.model.pretrained,
            "date": datetime.fromisoformat(origin.date).timestamp(),
            "lm_eval_version": origin.versions.get("lm-eval", ""),
        }
        result = {key: part for key, part in record.content.items() if key != "capmoe"}
        with writing("--lm-eval", directory):
            write_text(
                directory / cell.model.name / f"results_{cell.digest}.json",
                json.dumps(result | of_command_line, indent=1),
            )
    return len(records)


def write_parquet(root: Path, file: Path) -> None:
    """Write the data frame of a results directory to a Parquet file, which any such reader takes.

    Values of several types and tuples are JSON there. Errors as :func:`capmoe_eval.load_frame`.
    """
    frame = load_frame(root)
    for name in frame:
        if frame[name].dtype == object:
            frame[name] = [None if value is None else json.dumps(value) for value in frame[name]]
    with writing("--parquet", file), whole_file(file) as stream:
        frame.to_parquet(stream)
