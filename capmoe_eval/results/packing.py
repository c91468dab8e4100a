"""Pack and unpack the records of a results directory: ``capmoe-eval pack results_dir=DIR``."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from capmoe_eval.errors import UsageError, shown, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import Parser
from capmoe_eval.experiment.files import write_bytes
from capmoe_eval.experiment.packs import SUFFIX, open_pack, pack_path, packed
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.reservations import hold, print_warning, reserve, reserved, tidy
from capmoe_eval.experiment.results import loose_paths, record_paths

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
    options = parser.parse_args(arguments)

    def command() -> int:
        root = directory_of(options.place)
        packs, done = (unpack(root), "unpacked") if options.unpack else (pack(root), "packed")
        print(f"{len(packs)} files {done}; {len(record_paths(root))} records in {root}")
        return 0

    sys.exit(run_command(command))


def directory_of(word: str) -> Path:
    """Return the directory of ``results_dir=DIR``; UsageError for another word or no record."""
    root = Path(word.removeprefix(_KEY))
    if not word.startswith(_KEY) or not record_paths(root):
        line = "no results directory with records; name one with results_dir=DIR"
        raise UsageError(f"{shown(word)}: {line}")
    return root


def pack(root: Path, least: int = 1) -> list[Path]:
    """Pack the records of a results directory that have files of their own; return the packs.

    A pack is on the disk before the first of these files goes. As long as both are there the file
    counts. So no record is lost or counted twice, wherever this process is killed. What is no whole
    record stays as it is, with a warning, and so does a record that another process is writing.

    Args:
        root: The results directory; a shipped one that is read with it is left alone.
        least: The number of files from which on those of a model and a task are packed.

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
            with hold(file):
                if len(paths) >= least and _pack_folder(file, paths, root):
                    packs.append(file)
    return packs


def _pack_folder(file: Path, paths: Sequence[Path], root: Path) -> bool:
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
            print_warning(f"not packed: {error}")
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
