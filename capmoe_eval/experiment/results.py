"""A results directory: the one reader of its records.

A user's own results lie apart from those of the repository: ``results/local-zoo``, which git
ignores, is read together with ``results/zoo``, and it alone is written.
"""

import gc
import hashlib
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.packs import SUFFIX, open_pack, pack_with
from capmoe_eval.experiment.record import NotRegisteredError, Record, read_record

CALIBRATIONS: Final = "calibration"
"""The folder, beside those of a model's tasks, of what gamma=adaptive chooses from."""

LOCAL: Final = "local-"
"""How the name of a directory of a user's own results begins; the shipped one's name follows."""


def read_records(places: Iterable[tuple[Path, Path]], broken: list[str]) -> list[Record]:
    """Return the records at some paths, each with its results directory, in their order.

    ``broken`` gets a line for each file that is no whole record, and one for all records of methods
    that are not registered.
    """
    records: list[Record] = []
    missing: Counter[str] = Counter()
    collects = gc.isenabled()
    gc.disable()  # the collector would go through all records in vain
    try:
        for path, root in places:
            try:
                records.append(read_record(path, root))
            except NotRegisteredError as error:
                missing[error.missing] += 1
            except UsageError as error:
                if str(error) not in broken:  # of a pack, once
                    broken.append(str(error))
    finally:
        if collects:
            gc.enable()
    if missing:
        names = ", ".join(f"{name} ({count})" for name, count in sorted(missing.items()))
        line = f"records of what is not registered: {names}; the packages that register it, such as"
        broken.append(f"{line} capmoe-methods, are not installed")
    return records


def read_results(root: Path, broken: list[str], model: str = "*", task: str = "*") -> list[Record]:
    """Return every record that is read for a results directory, as :func:`read_records`."""
    return read_records(record_places(root, model, task), broken)


def named_directory(word: str) -> Path | None:
    """Return the directory of a word, None for a plain name; UsageError where there is none."""
    if Path(word).is_dir():
        return Path(word)
    if "/" in word:
        raise UsageError(f"{word}: no such directory; name one that has records")
    return None


def report_folder(root: Path) -> str:
    """Return the name under which all results of a directory are reported, which no other has.

    It is the path from the working directory, without ``results/``. Another place, or one whose
    name is also that of a directory in ``results/``, has a hash of its path behind its last part.
    """
    path, here = root.resolve(), Path.cwd().resolve()
    below = path.relative_to(here).as_posix() if path.is_relative_to(here) else "."
    name = below.removeprefix("results/")
    if below == "." or (name == below and (here / "results" / name).is_dir()):
        return f"{path.name}-{hashlib.sha256(bytes(path)).hexdigest()[:6]}"
    return name


def directories(root: Path) -> tuple[Path, ...]:
    """Return the directories that are read for a results directory: itself, then the shipped one.

    ``results/local-zoo`` has ``results/zoo`` beside it, or that of the package ``capmoe-records``;
    every other directory stands alone.
    """
    name = root.name.removeprefix(LOCAL)
    if name in ("", root.name):
        return (root,)
    package = find_spec("capmoe_records")
    installed = [] if package is None else package.submodule_search_locations or []
    places = [root.with_name(name), *(Path(folder) / name for folder in installed)]
    return root, next((place for place in places if place.is_dir()), places[0])


def stored(root: Path, path: Path) -> tuple[Path, Path] | None:
    """Return the path and results directory of a file of ``root``; None if there is no such file.

    A record is there in a file of its own or in a pack: its cell is finished. A user's own file
    goes before the shipped one.
    """
    place = path.relative_to(root)
    for directory in directories(root):
        file = directory / place
        try:
            is_there = file.exists() or pack_with(file) is not None
        except UsageError:  # of a damaged pack; reading the record says it
            is_there = True
        if is_there:
            return file, directory
    return None


def loose_paths(root: Path, model: str = "*", task: str = "*") -> list[Path]:
    """Return the paths of all records that have a file of their own, sorted.

    They are exactly ``<root>/<model>/<task>/*.json`` without hidden files; a model's calibrations
    lie beside its tasks.
    """
    paths = (p for p in root.glob(f"{model}/{task}/*.json") if p.parent.name != CALIBRATIONS)
    return sorted(path for path in paths if not path.name.startswith("."))


def record_paths(root: Path, model: str = "*", task: str = "*") -> list[Path]:
    """Return the paths of all records of a results directory, sorted, as if none were packed.

    Of a pack that is damaged it is the pack's own. Model and task may be patterns.
    """
    # Before the packs: what is packed meanwhile is there twice, not never.
    paths = set(loose_paths(root, model, task))
    for path in root.glob(f"{model}/{task}{SUFFIX}"):
        folder = path.with_name(path.name.removesuffix(SUFFIX))
        try:
            if (pack := open_pack(path)) is not None:
                paths.update(folder / name for name in pack.summaries)
        except UsageError:
            paths.add(path)
    return sorted(paths)


def record_places(root: Path, model: str = "*", task: str = "*") -> list[tuple[Path, Path]]:
    """Return path and directory of all records that are read for a results directory, sorted.

    Of a cell that was computed again the user's own record counts: it replaces a shipped one only
    where ``overwrite=true`` asked for it.
    """
    places = {
        path.relative_to(directory): (path, directory)
        for directory in reversed(directories(root))
        for path in record_paths(directory, model, task)
    }
    return [places[name] for name in sorted(places)]
