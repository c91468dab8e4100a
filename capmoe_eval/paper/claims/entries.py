"""The claims of ``data/claims.yaml``: the paper's words, and how they are checked."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from capmoe_eval.errors import field_problem
from capmoe_eval.experiment.data_file import read_yaml

Kind = Literal["number", "effect", "reading", "setting", "definition"]
"""number: a value in the text; effect: what a method does; reading: what tables or figures are said
to show; setting: how something was run; definition: an equation, an algorithm or a rule."""

CheckKind = Literal[
    "printed", "agree", "measured", "measure", "load", "promise", "value", "speedup", "none"
]
"""The kinds of checks; docs/claims.md defines them."""

Check = Annotated[dict[CheckKind, dict[str, Any]], Field(min_length=1, max_length=1)]
"""One way to check a claim: the arguments under their kind."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Published(_Part):
    """A value as the paper states it, or the several of one sentence."""

    values: tuple[float | str, ...]
    unit: str = ""

    def __str__(self) -> str:
        """Return the value with its unit."""
        text = ", ".join(f"{v:g}" if isinstance(v, float) else v for v in self.values)
        space = " " if self.unit and self.unit not in "×%" else ""
        return f"{text}{space}{self.unit}"


class Entry(_Part):
    """One claim or number of the paper."""

    id: str  # unique, short, fit for an anchor
    version: Literal["v1", "v2"]  # arXiv, ICLR 2026
    section: str  # the heading under which it is listed
    place: str  # section, table or figure
    quote: Annotated[str, Field(min_length=1, max_length=199)]  # the paper's own words
    kind: Kind
    published: Published | None = None
    note: str = ""  # what a reader should know besides
    checks: Annotated[
        tuple[Check, ...],
        BeforeValidator(lambda raw: raw if isinstance(raw, list) else [raw]),
        Field(alias="check", min_length=1),
    ]


@cache
def paper_claims() -> tuple[Entry, ...]:
    """Return every claim of the ledger, in the order of the paper."""
    source = resources.files(__package__) / "data" / "claims.yaml"
    return read_claims(source.read_text(encoding="utf-8"))


def read_claims(text: str) -> tuple[Entry, ...]:
    """Read claims from YAML; one that does not fit the schema is a ValueError that names it."""
    entries: dict[str, Entry] = {}
    for raw in read_yaml(text):
        try:
            entry = Entry.model_validate(raw)
        except ValidationError as error:
            raise ValueError(f"claim {raw.get('id')}: {field_problem(error)}") from error
        if entry.id in entries:
            raise ValueError(f"claims: an id is used twice: {entry.id}")
        entries[entry.id] = entry
    return tuple(entries.values())
