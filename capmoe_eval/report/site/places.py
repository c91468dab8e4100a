"""The directories of the machine that builds a site, which its pages do not name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path


def without_places(
    pages: Iterable[tuple[str, str]], places: Iterable[Path]
) -> Iterator[tuple[str, str]]:
    """Yield pages by path; what lies below a place is named without the directories above it.

    A place below the working directory is named from there, any other by its last part alone.
    Relative addresses, which links are, stay.
    """
    here, names = Path.cwd(), dict[str, str]()
    for place in places:
        for form in (place.absolute(), place.resolve()):
            inside = form.is_relative_to(here)
            name = form.relative_to(here).as_posix() if inside else f"…/{form.name}"
            if form.name:  # not the root, which is above all
                names[escape(form.as_posix())] = escape(name)
    longest_first = sorted(names, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w./…-])({'|'.join(map(re.escape, longest_first))})(?![\w.-])")
    for path, text in pages:
        yield path, pattern.sub(lambda match: names[match[1]], text)
