"""Read and write a file of ``results/bench/``, whole or refused.

A value of another type is refused, by the writer too. A field that the writer leaves out stays out:
a file that is read and written again is the same file.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from capmoe_eval.errors import UsageError, field_problem, shown
from capmoe_eval.experiment.files import write_text

Count = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """An object within a file."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Machine(Part):
    """The machine that something was timed on."""

    device: str
    name: str
    torch: str
    threads: Count

    def __str__(self) -> str:
        """Return it in a few words."""
        noun = "thread" if self.threads == 1 else "threads"
        threads = f", {self.threads} {noun}" if self.device == "cpu" else ""
        return f"{self.device}: {self.name}{threads}, torch {self.torch}"


class File(Part):
    """A whole file.

    Attributes:
        path: The file it was read from.
        digest: Beginning of the SHA-256 of its bytes.
    """

    SCHEMA: ClassVar[int]
    LAYOUT: ClassVar[dict[str, Any]] = {}

    schema_: int = Field(alias="schema")
    command: str
    path: Path = Field(default=Path(), exclude=True)
    digest: str = Field(default="", exclude=True)

    def text(self) -> str:
        """Return the file's text: the fields that were given, and no default."""
        content = self.model_dump(by_alias=True, exclude_unset=True)
        return json.dumps(content, indent=1, **self.LAYOUT) + "\n"

    def write(self, path: Path) -> None:
        """Write the file."""
        write_text(path, self.text())


FileT = TypeVar("FileT", bound=File)


def read_file(kind: type[FileT], path: Path, again: str) -> FileT:
    """Read a file.

    Args:
        kind: Its type.
        path: The file.
        again: The command that makes it anew.

    Raises:
        UsageError: If it cannot be read, is of another schema, or lacks something; the message is
            one line that names the field and the command.
    """

    def refused(problem: str) -> UsageError:
        return UsageError(f"{path}: {problem}; make it again: {again}")

    try:
        data = path.read_bytes()
        content: Any = from_json(data)
    except (OSError, ValueError) as error:
        raise refused(f"not a whole file ({error})") from error
    said = content.get("schema", "none") if isinstance(content, dict) else kind.SCHEMA
    if said != kind.SCHEMA:
        wanted = f"this version of capmoe_eval reads schema {kind.SCHEMA}"
        raise refused(f"the file has schema {shown(said)}, {wanted}")
    try:
        found = kind.model_validate_json(data)
    except ValidationError as error:
        raise refused(field_problem(error)) from error
    digest = hashlib.sha256(data).hexdigest()[:10]
    return found.model_copy(update={"path": path, "digest": digest})
