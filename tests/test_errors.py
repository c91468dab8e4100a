"""Whatever damaged bytes make a library raise is one line that names the file."""

import zipfile
from pathlib import Path

import pytest

from capmoe_eval.errors import EnforcementError, UsageError, closest, reading


@pytest.mark.parametrize("kind", [OSError, LookupError, MemoryError, zipfile.BadZipFile])
@pytest.mark.parametrize("words", [(), ("reason\nmore",)])
def test_what_is_wrong_with_a_file_is_a_line(kind: type[Exception], words: tuple[str, ...]) -> None:
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


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("tabel2", "table2"),
        ("fig3", None),
        ("arc_easy", None),
        ("zoo_olmo", "zoo_olmoe"),
        ("zoo_qwen_moe", "zoo_qwen2_moe"),
        ("image", "image_first"),
    ],
)
def test_a_suggestion_is_near_in_every_part_and_in_its_numbers(word: str, name: str | None) -> None:
    names = ["table2", "fig13", "fig2", "arc_c", "zoo_olmoe", "zoo_qwen2_moe", "image_first"]
    assert closest(word, names) == name
