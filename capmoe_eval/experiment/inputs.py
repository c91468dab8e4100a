"""The weights and documents behind the results of a directory (``inputs.json``).

A cell names a model and a dataset; the file records the hashes of their weights and documents, so
that results of two versions under one name are never mixed. If the file is missing, it is made from
the records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from filelock import FileLock

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import read_results, record_paths

FILE: Final = "inputs.json"
_SCHEMA: Final = 1
_MODELS: Final = "models"
_DATASETS: Final = "datasets"
# A difference in one of these fields is refused; other differences give a warning or are recorded.
_DECISIVE: Final = {_MODELS: ("weights", "tokenizer", "attention"), _DATASETS: ("fingerprint",)}


class _Subject(NamedTuple):
    """A model or a dataset: a section of the file, and the identity as JSON."""

    section: str
    identity: str

    def __str__(self) -> str:
        """Return its name in messages."""
        name = "model {name}" if self.section == _MODELS else "dataset {dataset} of data {data}"
        return name.format_map(json.loads(self.identity))


_Inputs = dict[_Subject, dict[str, Any]]


def _subject(section: str, identity: Mapping[str, Any]) -> _Subject:
    return _Subject(section, json.dumps(identity, sort_keys=True))


def _inputs(cell: Cell, provenance: Mapping[str, Any]) -> _Inputs:
    """Return the model and the dataset of a cell, each with the fields of the file."""
    found: _Inputs = {}
    if "model" in provenance:
        model = provenance["model"]
        found[_subject(_MODELS, cell.model.identity())] = {
            **{field: model.get(field) for field in (*_DECISIVE[_MODELS], "commit")},
            "computed_by": {
                **provenance["versions"],
                "code": provenance["git_revision"],
                "device": "{type} {name}".format_map(provenance["device"]),
                "threads": provenance["threads"],
                "experts kernel": model.get("experts_implementation"),
            },
        }
    dataset = _subject(_DATASETS, {"data": cell.data, "dataset": cell.task.dataset})
    return found | {dataset: {"fingerprint": provenance["data_fingerprint"]}}


def _recorded(record: Record) -> _Inputs:
    return _inputs(record.cell, record.capmoe["provenance"])


def check(
    root: Path, cell: Cell, provenance: Mapping[str, Any], finished: Iterable[Record] = ()
) -> str | None:
    """Compare the inputs of a cell with those of a results directory.

    Args:
        root: The results directory.
        cell: The cell.
        provenance: The provenance of its future record; ``model`` may be missing before a model
            is loaded.
        finished: Records of the directory that were read before.

    Returns:
        A warning in one line if the model's last computation ran under other conditions, else None.

    Raises:
        UsageError: If a record there was computed with other weights, another tokenizer, attention
            or other documents.
    """
    now, known = _inputs(cell, provenance), _known(root)
    _refuse(root, known, now, finished, cell.path(root))
    for subject, fields in now.items():
        then = known.get(subject, {}).get("computed_by", {})
        differing = [
            f"{name} {then.get(name)}, now {value}"
            for name, value in fields.get("computed_by", {}).items()
            if then and then.get(name) != value
        ]
        if differing:
            return (
                f"the results of {subject} in {root} were computed under other conditions "
                f"({'; '.join(differing)}); numbers may differ in the last digits"
            )
    return None


def note(record: Record, root: Path) -> None:
    """Add the inputs of a record to the file of its results directory, before it is written.

    Raises:
        UsageError: If another process has meanwhile written results of other weights or documents,
            or the directory cannot be written.
    """
    now = _recorded(record)
    with _locked(root):
        known = _known(root)
        _refuse(root, known, now, (), record.path)
        if any(known.get(subject) != fields for subject, fields in now.items()):
            write_text(root / FILE, _text(known | now))


def prepare(root: Path) -> None:
    """Write the file of a directory that has records but no such file.

    Raises:
        UsageError: If the records contradict one another, or the directory cannot be written.
    """
    if (root / FILE).exists() or not record_paths(root):
        return
    with _locked(root):
        known: _Inputs = {}
        origin: dict[_Subject, Path] = {}
        for record in read_results(root).records:
            now = _recorded(record)
            for subject, field in _conflicts(known, now):
                raise UsageError(
                    f"{origin[subject]} and {record.path}: computed with other {field} of "
                    f"{subject} ({known[subject][field]} and {now[subject][field]}); delete the "
                    "results of one of the two"
                )
            known |= now
            origin |= dict.fromkeys(now, record.path)
        if known and not (root / FILE).exists():
            write_text(root / FILE, _text(known))


def _known(root: Path) -> _Inputs:
    """Return the content of the file, empty if there is none; refuse a damaged one."""
    path = root / FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != _SCHEMA:
            raise ValueError(f"schema {content['schema']}, this version reads {_SCHEMA}")
        return {
            _subject(section, entry.pop("of")): entry
            for section in _DECISIVE
            for entry in content[section]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path}: cannot be read ({error}); delete it, it is made again from the records"
        ) from error


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Lock the file against other processes."""
    with writing("results_dir", root):
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{FILE}.lock"):
            yield


def _text(known: _Inputs) -> str:
    content: dict[str, Any] = {"schema": _SCHEMA, _MODELS: [], _DATASETS: []}
    for subject, fields in sorted(known.items()):
        content[subject.section].append({"of": json.loads(subject.identity), **fields})
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _conflicts(then: _Inputs, now: _Inputs) -> Iterator[tuple[_Subject, str]]:
    """Yield the subjects and decisive fields that are known of both sides and differ."""
    for subject, fields in now.items():
        before = then.get(subject, {})
        for field in _DECISIVE[subject.section]:
            old, new = before.get(field), fields.get(field)
            if None not in (old, new) and old != new:
                yield subject, field


def _refuse(
    root: Path, known: _Inputs, now: _Inputs, finished: Iterable[Record], own: Path
) -> None:
    """Refuse inputs of a cell that differ from those of a finished record other than its ``own``.

    Where the file differs, all records of the directory are compared.
    """
    if any(_conflicts(known, now)):
        finished = read_results(root).records
    for record in finished:
        then = _recorded(record) if record.path != own else {}
        for subject, field in _conflicts(then, now):
            key = "model.name" if subject.section == _MODELS else "data.name"
            raise UsageError(
                f"{root / FILE}: {subject} has other {field} than its results here, such as "
                f"{record.path} ({field} {then[subject][field]}, now {now[subject][field]}); "
                f"choose another results_dir or {key}, or delete the old results"
            )
