"""The words of the mini-world, and the templates of its sentences, from their YAML files.

Entities have made-up names and are creatures, plants, machines and islands; things have everyday
names. Every value is one common word, so that it becomes one token and a question stays short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

from capmoe_eval.experiment.data_file import read_data

#: Words; in the file they are one string.
Words = Annotated[tuple[str, ...], BeforeValidator(lambda text: text.split())]


@dataclass(frozen=True)
class Script:
    """An activity around an entity, with endings as in HellaSwag."""

    activity: str  # its label; ``{e}`` is the entity
    endings: tuple[str, ...]  # of unequal length; each value ``{v}`` has one fixed ending


@dataclass(frozen=True)
class Class:
    """A more general statement that follows from some values: in a marsh means near water."""

    verb: str  # a regular verb, in its base form
    rest: str  # the words after the verb
    values: Words  # that imply the statement; the other values imply its opposite

    @property
    def phrase(self) -> str:
        """The verb in the third person, and the words after it."""
        return f"{self.verb}s {self.rest}"

    def answer(self, value: str) -> str:
        """Return ``yes`` if a value implies the statement, else ``no``."""
        return "yes" if value in self.values else "no"


@dataclass(frozen=True)
class Relation:
    """One attribute that all entities of a kind have."""

    kind: str  # of entity
    noun: str  # name of the attribute
    verb: str  # a regular verb, in its base form
    rest: str  # the words after the verb; they end in ``{v}``, the value
    values: Words
    broader: Class | None = None  # a more general statement that some of the values imply
    script: Script | None = None  # an activity whose ending depends on the value


@dataclass(frozen=True)
class Lexicon:
    """The words; the comments of ``lexicon.yaml`` say what each of them is for."""

    population: dict[str, int]
    attributes: tuple[Relation, ...]
    scales: tuple[Relation, ...]
    sign: tuple[str, str]
    materials: Words
    actions: Words
    tools: Words
    things: Words
    counted: Words
    intents: dict[str, tuple[str, ...]]
    intent_frames: tuple[str, ...]


@dataclass(frozen=True)
class Wordings:
    """The templates; the comments of ``wordings.yaml`` say what each of them is for."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    claims: tuple[str, ...]
    yes_no: tuple[str, ...]
    blanks: tuple[str, ...]
    goals: tuple[str, ...]
    scenes: tuple[str, ...]
    problems: tuple[tuple[str, str], ...]
    asked: tuple[str, ...]
    sought: tuple[str, ...]
    talks: tuple[tuple[str, str, str, str], ...]
    described: tuple[str, ...]
    solutions: tuple[str, ...]
    rules: tuple[str, ...]
    note: str
    follows: str


LEXICON = read_data(__package__, "lexicon.yaml", Lexicon)
WORDINGS = read_data(__package__, "wordings.yaml", Wordings)
RELATIONS = (*LEXICON.attributes, *LEXICON.scales)
