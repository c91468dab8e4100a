"""Whatever damaged bytes make a library raise is one line that names the file."""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from capmoe_eval.errors import EnforcementError, UsageError, reading

OF_FILES = [
    *(OSError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile, EOFError),
    *(RecursionError, MemoryError, OverflowError, RuntimeError, NotImplementedError, zlib.error),
    *(AssertionError, struct.error, pickle.UnpicklingError, ZeroDivisionError),
]


@pytest.mark.parametrize("kind", OF_FILES)
@pytest.mark.parametrize("words", [(), ("reason\nmore",)])
def test_what_is_wrong_with_a_file_is_one_line(
    kind: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as refused, reading(Path("mine.npz"), "not whole", "copy it"):
        raise kind(*words)
    assert (
        str(refused.value)
        == f"mine.npz: not whole ({'reason' if words else kind.__name__}); copy it"
    )


@pytest.mark.parametrize("kind", [EnforcementError, BrokenPipeError, KeyboardInterrupt, SystemExit])
def test_what_is_not_of_the_file_is_not_blamed_on_it(kind: type[BaseException]) -> None:
    with pytest.raises(kind), reading(Path("mine.npz"), "not whole", "copy it"):
        raise kind
