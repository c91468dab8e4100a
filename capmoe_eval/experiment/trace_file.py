"""Write a trace of the router's choices, which ``capmoe-eval loads`` and ``advise`` read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from capmoe_eval.errors import writing
from capmoe_eval.experiment.files import whole_file

SCHEMA: Final = 1


def write_npz(
    path: Path,
    about: Mapping[str, Any],
    arrays: Mapping[str, npt.NDArray[Any]],
    *,
    compress: bool = False,
) -> None:
    """Write a trace whole, as ``.npz``.

    Args:
        path: The file.
        about: The facts of ``docs/reference/traces.md`` that are no arrays, JSON-ready.
        arrays: Its arrays by their names there.
        compress: Without, the file can be memory-mapped, whatever its size.

    Raises:
        UsageError: If the file cannot be written.
    """
    write: Any = np.savez_compressed if compress else np.savez
    with writing("trace", path), whole_file(path) as file:
        write(file, about=np.array(json.dumps({"schema": SCHEMA, **about})), **arrays)
