"""The claims of ``data/claims.yaml``: the paper's words, and how they are checked."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from capmoe_eval.errors import field_problem

Kind = Literal["number", "effect", "reading", "setting", "definition"]
"""number: a value in the text; effect: what a method does; reading: what tables or figures are said
to show; setting: how something was run; definition: an equation, an algorithm or a rule."""

CheckKind = Literal[
    "printed", "agree", "measured", "measure", "load", "promise", "value", "speedup", "none"
]
"""The kinds of checks; docs/claims.md defines them."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Check(_Part):
    """One way to check a claim: its kind and its arguments."""

    kind: CheckKind
    arguments: dict[str, Any]


class Published(_Part):
    """A value as the paper states it; several, where one sentence states several."""

    values: tuple[float | str, ...]
    unit: str = ""

    def __str__(self) -> str:
        """Return the value with its unit."""
        text = ", ".join(f"{v:g}" if isinstance(v, float) else v for v in self.values)
        space = " " if self.unit and self.unit not in "×%" else ""
        return f"{text}{space}{self.unit}"


def _checks(raw: Any) -> list[dict[str, Any]]:
    """Return the checks: one mapping, or a list of mappings, of one key each."""
    items = raw if isinstance(raw, list) else [raw]
    if not all(isinstance(item, dict) and len(item) == 1 for item in items):
        raise ValueError("a check has one key, its kind")
    return [{"kind": kind, "arguments": value} for item in items for kind, value in item.items()]


def _published(raw: Any) -> dict[str, Any]:
    """Return a published value: a scalar, or a value or several with a unit."""
    given = raw if isinstance(raw, dict) else {"value": raw}
    values = given["value"]
    return {
        "values": values if isinstance(values, list) else [values],
        "unit": given.get("unit", ""),
    }


class Entry(_Part):
    """One claim or number of the paper.

    Attributes:
        id: Unique, short, fit for an anchor.
        version: "v1" (arXiv) or "v2" (ICLR 2026).
        section: Heading under which it is listed.
        place: Section, table or figure.
        quote: The paper's own words.
        kind: One of :data:`Kind`.
        published: The stated value, or None.
        note: What a reader should know besides; may be empty.
        checks: How it is checked; never empty.
    """

    id: str
    version: Literal["v1", "v2"]
    section: str
    place: str
    quote: Annotated[str, Field(min_length=1, max_length=199)]
    kind: Kind
    published: Annotated[Published, BeforeValidator(_published)] | None = None
    note: str = ""
    checks: Annotated[
        tuple[Check, ...], BeforeValidator(_checks), Field(alias="check", min_length=1)
    ]


@cache
def paper_claims() -> tuple[Entry, ...]:
    """Return every claim of the ledger, in the order of the paper."""
    source = resources.files(__package__) / "data" / "claims.yaml"
    return read_claims(source.read_text(encoding="utf-8"))


def read_claims(text: str) -> tuple[Entry, ...]:
    """Read claims from YAML.

    Raises:
        ValueError: If an entry does not fit the schema; the message names it.
    """
    # The C loader where there is one: the pure one takes most of the command's time.
    loaded = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    entries = tuple(_entry(raw) for raw in loaded)
    ids = [entry.id for entry in entries]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ValueError(f"claims: ids are used twice: {', '.join(twice)}")
    return entries


def _entry(raw: dict[str, Any]) -> Entry:
    try:
        return Entry.model_validate(raw)
    except ValidationError as error:
        raise ValueError(f"claim {raw.get('id')}: {field_problem(error)}") from error
