"""Records as a pandas data frame, for questions that no table of the paper asks."""

from __future__ import annotations

import warnings
from pathlib import Path

import pandas as pd

from capmoe_eval.experiment.record import Record
from capmoe_eval.experiment.results import read_results, result_directories


def load_frame(root: Path | str) -> pd.DataFrame:
    """Return one row per record of a results directory, in the order of their paths.

    Columns: ``model``, ``task``, ``label``, the method's own knobs (``method``, ``gamma``, …;
    missing where a method has no such knob), ``value`` and ``stderr`` (fractions), ``n``
    (documents), ``drop_rate``, ``pad_waste``, ``effective_gamma`` (capacity over the mean load;
    missing without a capacity), ``peak_before``, ``peak_after`` (highest expert load over the
    mean), ``proven`` (no promise was broken), ``seconds`` and ``path``.

    Args:
        root: The directory of a profile (``results/zoo``), or of several (``results``).

    A file there that is no whole record is left out, with a warning that names it.
    """
    rows = []
    for directory in result_directories(Path(root)):
        found = read_results(directory)
        rows += [_row(record) for record in found.records]
        for line in found.broken:
            warnings.warn(f"left out: {line}", stacklevel=2)
    return pd.DataFrame(rows)


def _row(record: Record) -> dict[str, object]:
    knobs = record.cell.method.identity()
    if "gamma" in knobs:
        knobs["gamma"] = float(knobs["gamma"])
    return {
        "model": record.model,
        "task": record.task,
        "label": record.cell.label,
        **knobs,
        "value": record.value,
        "stderr": record.stderr,
        "n": record.n,
        "drop_rate": record.load.drop_rate,
        "pad_waste": record.load.pad_waste,
        "effective_gamma": record.load.effective_gamma,
        "peak_before": record.load.peak_before,
        "peak_after": record.load.peak_after,
        "proven": not record.proofs.broken,
        "seconds": record.provenance.seconds,
        "path": str(record.path),
    }
