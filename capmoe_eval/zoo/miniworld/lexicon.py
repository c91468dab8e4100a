"""The words of the mini-world, and the templates of its sentences, from their YAML files.

Entities have made-up names and are creatures, plants, machines and islands; things have everyday
names. Every value is one common word, so that it becomes one token and a question stays short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from capmoe_eval.experiment.checked import BeforeValidator
from capmoe_eval.experiment.data_file import read_data

#: Words; in the file they are one string.
Words = Annotated[tuple[str, ...], BeforeValidator(lambda text: text.split())]


@dataclass(frozen=True)
class Script:
    """An activity around an entity, with endings as in HellaSwag.

    Attributes:
        activity: Label of the activity; ``{e}`` is the entity.
        endings: Endings of unequal length; ``{v}`` is the value. Each value has one fixed ending.
    """

    activity: str
    endings: tuple[str, ...]


@dataclass(frozen=True)
class Class:
    """A more general statement that follows from some values: in a marsh means near water.

    Attributes:
        verb: A regular verb, in its base form.
        rest: The words after the verb.
        values: The values that imply the statement; the other values imply its opposite.
    """

    verb: str
    rest: str
    values: Words


@dataclass(frozen=True)
class Relation:
    """One attribute that all entities of a kind have.

    Attributes:
        kind: Kind of entity.
        noun: Name of the attribute.
        verb: A regular verb, in its base form.
        rest: The words after the verb; they end in ``{v}``, the value.
        values: The possible values.
        broader: A more general statement that some of the values imply, or None.
        script: An activity whose ending depends on the value, or None.
    """

    kind: str
    noun: str
    verb: str
    rest: str
    values: Words
    broader: Class | None = None
    script: Script | None = None


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
