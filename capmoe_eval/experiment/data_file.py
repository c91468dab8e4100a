"""Read the YAML files that are data of the package."""

from __future__ import annotations

from importlib import resources
from typing import Any, TypeVar

import yaml
from pydantic import ConfigDict, TypeAdapter

_T = TypeVar("_T")


def read_yaml(text: str) -> Any:
    """Return the content of YAML text."""
    # The C loader where there is one: the pure one takes most of a command's time.
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_data(package: str, name: str, kind: type[_T]) -> _T:
    """Return the content of a file of a package as a type, which refuses unknown fields.

    Raises:
        pydantic.ValidationError: If the content does not fit.
    """
    content = read_yaml((resources.files(package) / name).read_text(encoding="utf-8"))
    # In a tuple, since a bare dataclass takes no configuration.
    adapter = TypeAdapter(tuple[kind], config=ConfigDict(extra="forbid"))  # type: ignore[valid-type]
    data: _T = adapter.validate_python((content,))[0]
    return data
