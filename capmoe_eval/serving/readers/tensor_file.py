"""Read files that ``torch.save`` wrote, without running anything that is in them."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

from capmoe_eval.errors import UsageError, first_line


def load_tensors(path: Path) -> Any:
    """Return the tensors, numbers, texts, lists and dictionaries of a file of ``torch.save``.

    Raises:
        UsageError: If it holds anything else, or is no such file.
    """
    import torch

    try:
        with path.open("rb") as file:
            start = file.read(2)
        if not start.startswith((b"PK", b"\x80")):  # an archive, or a pickle
            raise ValueError("it begins with other bytes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of versions of pickles
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path}: not read, because it holds more than tensors and plain values, and a pickle "
            "can run any program (torch.load refuses it with weights_only=True); save tensors, "
            "numbers and lists alone"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        reason = first_line(error).partition(". ")[0]
        raise UsageError(
            f"{path}: no whole file of torch.save ({reason}); write it or copy it again"
        ) from error
