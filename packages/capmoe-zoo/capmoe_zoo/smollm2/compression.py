"""The bytes of an artefact: a safetensors file that xz compressed."""

import lzma
from pathlib import Path
from typing import Final

from capmoe_eval.errors import UsageError

_FILTERS: Final = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 3, "lp": 1, "pb": 1}
]
"""Those of xz for numbers of two bytes: the low bytes are noise, the high ones are not."""


def compress(data: bytes) -> bytes:
    """Return what an artefact's file has, from the bytes of a safetensors file."""
    return lzma.compress(data, filters=_FILTERS)


def decompress(artefact: Path) -> bytes:
    """Return the bytes of a safetensors file from an artefact's; UsageError if it has none."""
    if not artefact.is_file():
        raise UsageError(
            f"artefact={artefact}: no such file; take it from the repository, or train one "
            "(packages/capmoe-zoo/README.md)"
        )
    try:
        return lzma.decompress(artefact.read_bytes())
    except lzma.LZMAError as error:
        raise UsageError(
            f"artefact={artefact}: not compressed by xz, or damaged ({error}); take it from the "
            "repository again"
        ) from error
