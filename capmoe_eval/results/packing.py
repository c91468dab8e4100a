"""Pack and unpack the records of a results directory: ``capmoe-eval pack results_dir=DIR``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

from capmoe_eval.errors import UsageError, shown, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser
from capmoe_eval.experiment.files import check_file, write_bytes, write_text
from capmoe_eval.experiment.packs import SUFFIX, open_pack, pack_path, packed
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.reservations import hold, print_warning, reserve, reserved, tidy
from capmoe_eval.experiment.results import loose_paths, read_results, record_paths
from capmoe_eval.results.frames import write_parquet

_LEAST: Final = 12
"""Records of a model and a task from which on the end of a run packs them."""
_KEY: Final = "results_dir="


def main(arguments: Sequence[str] | None = None) -> None:
    """Pack or unpack a results directory and exit: 0 done, 2 bad input."""
    parser = Parser(
        prog="capmoe-eval pack",
        description="Pack finished records into one file for each model and task. Every command "
        "reads both forms; a run of many cells packs its own when it ends.",
    )
    parser.add_argument(
        "place",
        nargs="?",
        default=f"{_KEY}results/local-zoo",
        metavar="results_dir=DIR",
        help="directory of the records (default: results/local-zoo)",
    )
    parser.add_argument(
        "--unpack", action="store_true", help="give every record a file of its own again"
    )
    parser.add_argument(
        "--parquet", type=PATH, metavar="FILE", help="also write a data frame, for pandas"
    )
    parser.add_argument(
        "--lm-eval",
        type=PATH,
        metavar="DIR",
        help="also write result files of lm-eval, for tools that read these",
    )
    options = parser.parse_args(arguments)

    def command() -> int:
        root = Path(options.place.removeprefix(_KEY))
        if not options.place.startswith(_KEY) or not record_paths(root):
            raise UsageError(
                f"{shown(options.place)}: no results directory with records; name one with "
                "results_dir=DIR"
            )
        if options.parquet is not None:
            check_file("parquet", options.parquet)
        packs = unpack(root) if options.unpack else pack(root)
        done = "unpacked" if options.unpack else "packed"
        print(f"{len(packs)} files {done}; {len(record_paths(root))} records in {root}")
        if options.parquet is not None:
            write_parquet(root, options.parquet)
            print(f"written: {options.parquet}")
        if options.lm_eval is not None:
            print(f"written: {write_lm_eval(root, options.lm_eval)} files in {options.lm_eval}")
        return 0

    sys.exit(run_command(command))


def pack(root: Path, least: int = 1, say: Callable[[str], None] = print_warning) -> list[Path]:
    """Pack the records of a results directory that have files of their own; return the packs.

    A pack is on the disk before the first of these files goes. As long as both are there the file
    counts. So no record is lost or counted twice, wherever this process is killed. What is no whole
    record stays as it is, and so does a record that another process is writing.

    Args:
        root: The results directory; a shipped one that is read with it is left alone.
        least: The number of files from which on those of a model and a task are packed.
        say: Is told of each file that is no whole record, and of a process that is waited for.

    Raises:
        UsageError: If a pack is damaged, or nothing can be written.
    """
    folders: dict[Path, list[Path]] = {}
    for path in loose_paths(root):
        folders.setdefault(path.parent, []).append(path)
    packs = []
    with writing("results_dir", root):
        tidy({folder.parent for folder in folders})
        for paths in folders.values():
            file = pack_path(paths[0])
            with hold(file, say):
                if len(paths) >= least and _pack_folder(file, paths, root, say):
                    packs.append(file)
    return packs


def _pack_folder(file: Path, paths: Sequence[Path], root: Path, say: Callable[[str], None]) -> bool:
    """Write the pack of a folder, which this process holds, then remove what is in it."""
    before = open_pack(file)
    records = {} if before is None else {name: before.record(name) for name in before.summaries}
    loose: dict[Path, bytes] = {}
    for path in paths:
        try:
            read_record(path, root)
            loose[path] = records[path.name] = path.read_bytes()
        except FileNotFoundError:  # deleted meanwhile
            pass
        except UsageError as error:
            say(f"not packed: {error}")
    if not loose:
        return False
    write_bytes(file, packed(records))
    for path, data in loose.items():
        if (reservation := reserve(path)) is not None:
            with reservation, suppress(FileNotFoundError):
                if path.read_bytes() == data:  # else it was computed again meanwhile
                    path.unlink()
    with suppress(OSError):  # it has other files
        paths[0].parent.rmdir()
    return True


def pack_idle(root: Path) -> list[Path]:
    """Pack a results directory as :func:`pack` does, unless a process is computing there.

    Few files of a model and a task stay as they are, which are easier to look at.
    """
    folders = list(root.glob("*/*/"))
    tidy(folders)
    if reserved(folders):
        return []
    return pack(root, _LEAST)


def unpack(root: Path) -> list[Path]:
    """Give the packed records of a results directory files of their own again; return the packs.

    A file that is there counts and stays. Errors as :func:`pack`.
    """
    packs = sorted(root.glob(f"*/*{SUFFIX}"))
    with writing("results_dir", root):
        for file in packs:
            with hold(file):
                if (pack := open_pack(file)) is None:
                    continue
                for name in pack.summaries:
                    path = file.with_name(file.name.removesuffix(SUFFIX)) / name
                    if not path.exists():
                        write_bytes(path, pack.record(name))
                file.unlink()
    return packs


def write_lm_eval(root: Path, directory: Path) -> int:
    """Write each record as a result file of lm-eval's command line; return how many.

    ``<model>/results_<digest>.json`` is what lm-eval returned, with the fields that its command
    line adds. ``config.model_args`` has the method with its knobs, ``config.capmoe`` the loads. A
    record that cannot be read is told on standard error.

    Raises:
        UsageError: If a file cannot be written.
    """
    broken: list[str] = []
    records = read_results(root, broken)
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
        with writing("lm-eval", directory):
            write_text(
                directory / cell.model.name / f"results_{cell.digest}.json",
                json.dumps(result | of_command_line, indent=1),
            )
    for line in broken:
        print_warning(line)
    return len(records)
