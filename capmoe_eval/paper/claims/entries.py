"""What the paper says: its claims as data, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

import yaml

KINDS: Final = ("number", "effect", "reading", "setting", "definition")
"""number: a value in the text; effect: what a method does; reading: what tables or figures are said
to show; setting: how something was run; definition: an equation, an algorithm or a rule."""

CHECKS: Final = (
    "printed",
    "agree",
    "measured",
    "load",
    "promise",
    "value",
    "replication",
    "speedup",
    "none",
)
_QUOTE_LENGTH: Final = 200
_REQUIRED: Final = ("id", "version", "section", "place", "quote", "kind", "check")
_OPTIONAL: Final = ("published", "note")


@dataclass(frozen=True)
class Check:
    """One way to check a claim: the kind of check, one of :data:`CHECKS`, and its arguments."""

    kind: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Published:
    """A value as the paper states it; several, where one sentence states several."""

    values: tuple[float | str, ...]
    unit: str = ""

    def __str__(self) -> str:
        """Return the value with its unit."""
        text = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in self.values)
        return (
            text if not self.unit else text + (self.unit if self.unit in "×%" else f" {self.unit}")
        )


@dataclass(frozen=True)
class Entry:
    """One claim or number of the paper.

    Attributes:
        id: Unique, short, fit for an anchor.
        version: "v1" (arXiv) or "v2" (ICLR 2026).
        section: Heading under which it is listed.
        place: Section, table or figure.
        quote: The paper's own words.
        kind: One of :data:`KINDS`.
        checks: How it is checked; never empty.
        published: The stated value, or None.
        note: What a reader should know besides; may be empty.
    """

    id: str
    version: str
    section: str
    place: str
    quote: str
    kind: str
    checks: tuple[Check, ...]
    published: Published | None = None
    note: str = ""


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
    if not isinstance(loaded, list):
        raise ValueError("claims: expected a list of entries")
    entries = tuple(_entry(raw) for raw in loaded)
    ids = [entry.id for entry in entries]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ValueError(f"claims: ids are used twice: {', '.join(twice)}")
    return entries


def _entry(raw: object) -> Entry:
    if not isinstance(raw, dict) or "id" not in raw:
        raise ValueError(f"claims: an entry needs an id, got {raw!r}")
    where = f"claim {raw['id']}"
    missing = [key for key in _REQUIRED if key not in raw]
    unknown = sorted(set(raw) - {*_REQUIRED, *_OPTIONAL})
    if missing or unknown:
        raise ValueError(f"{where}: missing {missing}, unknown {unknown}")
    if raw["kind"] not in KINDS:
        raise ValueError(f"{where}: kind {raw['kind']!r} is none of {', '.join(KINDS)}")
    if raw["version"] not in ("v1", "v2"):
        raise ValueError(f"{where}: version {raw['version']!r} is neither v1 nor v2")
    if not 0 < len(raw["quote"]) < _QUOTE_LENGTH:
        raise ValueError(f"{where}: a quote has 1 to {_QUOTE_LENGTH - 1} characters")
    return Entry(
        id=str(raw["id"]),
        version=raw["version"],
        section=str(raw["section"]),
        place=str(raw["place"]),
        quote=raw["quote"],
        kind=raw["kind"],
        checks=_checks(raw["check"], where),
        published=_published(raw.get("published")),
        note=raw.get("note", ""),
    )


def _checks(raw: object, where: str) -> tuple[Check, ...]:
    """Return the checks: one mapping, or a list of mappings, of one key each."""
    items = raw if isinstance(raw, list) else [raw]
    checks = []
    for item in items:
        if not isinstance(item, dict) or len(item) != 1:
            raise ValueError(f"{where}: a check has one key, its kind; got {item!r}")
        [(kind, arguments)] = item.items()
        if kind not in CHECKS:
            raise ValueError(f"{where}: check {kind!r} is none of {', '.join(CHECKS)}")
        if not isinstance(arguments, dict):
            raise ValueError(f"{where}: check {kind} needs arguments, got {arguments!r}")
        checks.append(Check(kind, arguments))
    if not checks:
        raise ValueError(f"{where}: it needs a check, if only 'none' with a reason")
    return tuple(checks)


def _published(raw: object) -> Published | None:
    if raw is None:
        return None
    if not isinstance(raw, dict):
        return Published(_values([raw]))
    value = raw["value"]
    return Published(_values(value if isinstance(value, list) else [value]), raw.get("unit", ""))


def _values(raw: Sequence[Any]) -> tuple[float | str, ...]:
    return tuple(v if isinstance(v, str) else float(v) for v in raw)
