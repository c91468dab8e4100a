"""Read files that ``torch.save`` wrote, without running anything that is in them."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

from capmoe_eval.errors import UsageError, first_line
from capmoe_eval.serving.trace import Array
from capmoe_eval.serving.trace_file import check_regular


def load_tensors(path: Path) -> Any:
    """Return the tensors, numbers, texts, lists and dictionaries of a file of ``torch.save``.

    Raises:
        UsageError: If it holds anything else, or is no such file.
    """
    import torch

    check_regular(path)
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
    except Exception as error:  # a damaged pickle raises what its instructions meet
        reason = first_line(error).partition(". ")[0]
        raise UsageError(
            f"{path}: no whole file of torch.save ({reason}); write it or copy it again"
        ) from error


def array(field: str, tensor: Any) -> Array:
    """Return a tensor that a file holds as an array; bfloat16, which numpy lacks, as float32.

    Raises:
        UsageError: If it is no dense tensor, or repeats its numbers (``expand``): a small file
            could then stand for any size.
    """
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise UsageError(f"{field}: is no dense tensor; save one by torch.save")
    if tensor.is_quantized or tensor.is_meta:
        raise UsageError(f"{field}: is quantized, or without numbers; save plain numbers")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UsageError(f"{field}: repeats its numbers (expand); save tensor.contiguous()")
    tensor = tensor.detach()
    numbers: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return numbers
