"""A JSON file, field by field: what is not as it must be gives one clear line."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capmoe_eval.errors import UsageError


class Content:
    """An object of a JSON file; every access checks what it returns.

    Args:
        value: What lies there.
        path: The file.
        again: The command that makes the file anew.
        where: The place in the file, such as ``runs[0].``; empty for the whole.
    """

    def __init__(self, value: object, path: Path, again: str, where: str = "") -> None:
        self._path, self._again, self._where = path, again, where
        if not isinstance(value, dict):
            raise self.error(where.rstrip(".") or "the file", "is not an object")
        self._value: dict[str, Any] = value

    def error(self, name: str, problem: str) -> UsageError:
        """Return the error for a field."""
        shown = name if name == "the file" else f"field {name!r}"
        return UsageError(f"{self._path}: {shown} {problem}; make it again: {self._again}")

    def wrong(self, key: str, problem: str) -> UsageError:
        """Return the error for a field of this object."""
        return self.error(self._where + key, problem)

    def has(self, key: str) -> bool:
        """Return whether a field is there and not null."""
        return self._value.get(key) is not None

    def text(self, key: str) -> str:
        """Return a text."""
        value = self._value.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "is no text")
        return value

    def optional_text(self, key: str) -> str | None:
        """Return a text, or None where the field is null."""
        return self.text(key) if self.has(key) else None

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return true or false; what is not there is the default, if there is one."""
        value = self._value.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "is neither true nor false")
        return value

    def number(self, key: str, least: float = 0.0) -> float:
        """Return a finite number of at least ``least``."""
        value = self._value.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, "is no number")
        if not math.isfinite(value) or value < least:
            raise self.wrong(key, f"is {value}, no finite number of at least {least:g}")
        return float(value)

    def optional_number(self, key: str, least: float = 0.0) -> float | None:
        """Return a finite number, or None where the field is null."""
        return self.number(key, least) if self.has(key) else None

    def whole(self, key: str, least: int = 0) -> int:
        """Return a whole number of at least ``least``."""
        value = self._value.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"is no whole number of at least {least}")
        return value

    def part(self, key: str) -> Content:
        """Return an object within this one."""
        return Content(self._value.get(key), self._path, self._again, f"{self._where}{key}.")

    def parts(self, key: str, least: int = 1) -> list[Content]:
        """Return a list of at least ``least`` objects."""
        value = self._value.get(key)
        if not isinstance(value, list) or len(value) < least:
            raise self.wrong(key, f"is no list of at least {least}")
        return [
            Content(item, self._path, self._again, f"{self._where}{key}[{number}].")
            for number, item in enumerate(value)
        ]

    def items(self) -> Iterator[tuple[str, Content]]:
        """Yield every field, all of them objects."""
        for key in self._value:
            yield key, self.part(key)

    def keys(self) -> list[str]:
        """Return the names of the fields."""
        return list(self._value)


def read_content(path: Path, schema: int, again: str) -> tuple[Content, str]:
    """Read a JSON object of one schema.

    Returns:
        The object, and the beginning of the file's SHA-256.

    Raises:
        UsageError: If the file cannot be read, or holds something else.
    """
    try:
        data = path.read_bytes()
        value = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not a whole file ({error}); make it again: {again}") from error
    content = Content(value, path, again)
    if not isinstance(value.get("schema"), int) or value["schema"] != schema:
        said = value.get("schema", "none")
        raise content.error(
            "the file", f"has schema {said}, this version of capmoe_eval reads schema {schema}"
        )
    return content, hashlib.sha256(data).hexdigest()[:10]
