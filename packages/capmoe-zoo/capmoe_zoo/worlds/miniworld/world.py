"""The mini-world: its entities and the facts about them.

A fact is an entity, a relation and a value, drawn from the seed of the world. The corpus states it
in several *wordings*: those of ``TRAIN_WORDINGS`` for every fact, and one more wording that belongs
to each evaluation split. Half of the facts belong to a split and are not in the corpus in its
wording; the other half are, so that the model learns what the wording means. So no question of a
split is in the corpus, and the two splits share neither a wording nor a fact.

The words, and the templates of sentences, are in YAML files. Entities have made-up names and are
creatures, plants, machines and islands; things have everyday names. Every value is one common
word, so that it becomes one token and a question stays short.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from capmoe_eval.experiment.files import read_data

from capmoe_zoo.worlds.draw import Draw


@dataclass(frozen=True)
class Class:
    """A more general statement that follows from some values: in a marsh means near water."""

    verb: str  # a regular verb, in its base form
    rest: str  # the words after the verb
    values: tuple[str, ...]  # that imply the statement; the other values imply its opposite

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
    values: tuple[str, ...]
    broader: Class | None = None  # a more general statement that some of the values imply
    # An activity as in HellaSwag, whose ending depends on the value.
    activity: str = ""  # its label; ``{e}`` is the entity
    endings: tuple[str, ...] = ()  # of unequal length; each value ``{v}`` has one fixed ending


#: The words; the comments of ``lexicon.yaml`` say what each of them is for.
LEXICON = read_data(__package__, "lexicon.yaml", dict[str, Any])
#: The templates by kind; the comments of ``wordings.yaml`` say what each of them is for.
WORDINGS = read_data(__package__, "wordings.yaml", dict[str, tuple[str, ...]])
_RELATIONS = read_data(__package__, "relations.yaml", dict[str, tuple[Relation, ...]])
#: The relations of four values in a fixed order, about which MMLU asks.
SCALES = _RELATIONS["scales"]
RELATIONS = (*_RELATIONS["attributes"], *SCALES)

_T = TypeVar("_T")

#: Number of words for each of the three places of a name. Most combinations are names, so that no
#: word alone, and no two, say much about an entity.
NAME_WORDS, NAME_LENGTH = 7, 3

#: Seed of the world that the shipped models were trained on.
WORLD_SEED = 7

TRAIN_WORDINGS = (0, 1, 2, 3)
#: Index of the wording of each evaluation split.
SPLIT_WORDING = {"dev": 4, "test": 5}
SPLITS = tuple(SPLIT_WORDING)


@dataclass(frozen=True)
class Fact:
    """A fact: the value of an attribute of an entity."""

    entity: str
    relation: Relation
    value: str  # one word
    split: str  # the evaluation split that it belongs to

    @property
    def holds(self) -> bool:
        """True if the fact implies its relation's broader statement; the relation must have one."""
        assert self.relation.broader is not None
        return self.value in self.relation.broader.values

    def allows(self, wording: int) -> bool:
        """Return whether the corpus may state this fact in the given wording."""
        return wording != SPLIT_WORDING[self.split]


@dataclass(frozen=True)
class MiniWorld:
    """All facts."""

    seed: int
    # About creatures, plants, machines and islands, entity by entity; the best known first.
    facts: tuple[Fact, ...]
    # The tool for each action on each thing; the relation's noun is the action. The tool depends on
    # the action and the thing's material together, not on either alone. Best known things first.
    rules: tuple[Fact, ...]

    @functools.cached_property
    def by_entity(self) -> Mapping[str, Sequence[Fact]]:
        """The facts of each entity."""
        return _grouped(self.facts, lambda fact: fact.entity)

    @functools.cached_property
    def by_relation(self) -> Mapping[Relation, Sequence[Fact]]:
        """The facts of each relation."""
        return _grouped(self.facts, lambda fact: fact.relation)

    @functools.cached_property
    def by_thing(self) -> Mapping[str, Sequence[Fact]]:
        """The rules of each thing."""
        return _grouped(self.rules, lambda rule: rule.entity)

    def rivals(self, fact: Fact) -> Sequence[Fact]:
        """Return facts with another value: of a rule, the other rules of the same thing.

        Those of a fact are about entities whose name differs in one or two words; those that differ
        in one word alone are returned if they have three values or more.
        """
        if fact.entity in self.by_thing:
            return [other for other in self.by_thing[fact.entity] if other.value != fact.value]
        words = set(fact.entity.split())
        shared: dict[int, list[Fact]] = {0: [], 1: [], 2: []}
        for other in self.by_relation[fact.relation]:
            if other.value != fact.value:
                shared[len(words & set(other.entity.split()))].append(other)
        near = shared[2]
        return near if len({other.value for other in near}) >= 3 else near + shared[1]

    @functools.cached_property
    def broader(self) -> Mapping[bool, Sequence[Fact]]:
        """The facts from which a broader statement follows (True), or its opposite (False).

        A fact occurs once for each statement; its relation has that one.
        """
        facts = [
            replace(fact, relation=replace(fact.relation, broader=sign))
            for fact in self.facts
            for sign in statements(fact.relation)
        ]
        return {holds: [f for f in facts if f.holds == holds] for holds in (False, True)}

    @functools.cached_property
    def scripted(self) -> Sequence[Fact]:
        """The facts whose relation has an activity."""
        return [fact for fact in self.facts if fact.relation.activity]


@functools.cache
def world(seed: int = WORLD_SEED) -> MiniWorld:
    """Return the world of a seed; equal seeds give equal worlds in every process."""
    draw = Draw(f"world-{seed}")
    names = iter(_names(draw, sum(LEXICON["population"].values())))
    entities = {
        kind: list(itertools.islice(names, count)) for kind, count in LEXICON["population"].items()
    }
    triples = [
        (entity, relation, draw.one(relation.values))
        for kind, members in entities.items()
        for entity in members
        for relation in RELATIONS
        if relation.kind == kind
    ]
    fame = {m: place / len(ms) for ms in entities.values() for place, m in enumerate(ms)}
    triples.sort(key=lambda fact: fame[fact[0]])
    materials = {thing: draw.one(LEXICON["materials"]) for thing in LEXICON["things"]}
    tools = {
        Relation("thing", action, action, "the {v}", tuple(LEXICON["tools"])): dict(
            zip(LEXICON["materials"], draw.shuffled(LEXICON["tools"]), strict=True)
        )
        for action in LEXICON["actions"]
    }
    used = [
        (thing, relation, of_material[material])
        for thing, material in materials.items()
        for relation, of_material in tools.items()
    ]
    return MiniWorld(seed, _halved(draw, triples), _halved(draw, used))


@functools.cache
def statements(relation: Relation) -> Sequence[Class]:
    """Return a relation's broader statement and another, true of a random half of the values.

    Of half of the values one of both is true, so that a value alone does not tell the answer.
    """
    if relation.broader is None:
        return ()
    verb, rest = LEXICON["sign"]
    draw = Draw(f"statements-{relation.kind}-{relation.noun}")
    true = draw.shuffled(relation.broader.values)
    false = draw.shuffled([v for v in relation.values if v not in relation.broader.values])
    half = (*true[: len(true) // 2], *false[: len(false) // 2])
    return relation.broader, Class(verb, rest.format(n=relation.noun), half)


def say(kind: str, wording: int, fact: Fact, **more: str) -> str:
    """Return a template of ``wordings.yaml`` filled with a fact, and with ``more`` fields."""
    relation, broader = fact.relation, fact.relation.broader
    rest = relation.rest.format(v=fact.value)
    if broader is not None:
        more |= {"p": broader.phrase, "q": f"{broader.verb} {broader.rest}"}
    return WORDINGS[kind][wording].format(
        e=fact.entity, v=fact.value, n=relation.noun, s=f"{relation.verb}s {rest}", **more
    )


def apart(name: str, items: Sequence[_T], share: int) -> Mapping[str, Sequence[_T]]:
    """Return items in a random order, one in ``share`` for each split and the rest for ``train``.

    ``name`` is the seed of the order.
    """
    mixed = Draw(name).shuffled(items)
    held = len(mixed) // share
    return {"dev": mixed[:held], "test": mixed[held : 2 * held], "train": mixed[2 * held :]}


def _grouped(facts: Sequence[Fact], key: Callable[[Fact], _T]) -> dict[_T, list[Fact]]:
    groups: dict[_T, list[Fact]] = {}
    for fact in facts:
        groups.setdefault(key(fact), []).append(fact)
    return groups


def _halved(draw: Draw, triples: Sequence[tuple[str, Relation, str]]) -> tuple[Fact, ...]:
    """Return the facts, half of those of every relation in each evaluation split."""
    split = {}
    for relation in dict.fromkeys(relation for _, relation, _ in triples):
        places = [place for place, triple in enumerate(triples) if triple[1] == relation]
        for order, place in enumerate(draw.shuffled(places)):
            split[place] = SPLITS[order % len(SPLITS)]
    return tuple(Fact(*parts, split=split[place]) for place, parts in enumerate(triples))


def _names(draw: Draw, count: int) -> list[str]:
    """Return random names of three words.

    With few words for many names, the facts about an entity cannot be known from one word of its
    name. With one word per entity the model could look the facts up without experts: attention
    copies what the word's embedding holds.
    """
    real_words = {"kebab", "topaz", "felix", "galop", "relax"}
    words: dict[str, None] = {}
    while len(words) < NAME_WORDS * NAME_LENGTH:
        letters = ("bdfgklmnprtvz", "aeiou", "bdfgklmnprtvz", "aeiou", "bgkpx")
        word = "".join(draw.one(choices) for choices in letters)
        if word not in real_words:
            words[word] = None
    places = (list(words)[place::NAME_LENGTH] for place in range(NAME_LENGTH))
    return draw.some([" ".join(name) for name in itertools.product(*places)], count)
