"""The mini-world: its entities and the facts about them.

A fact is an entity, a relation and a value, drawn from the seed of the world. The corpus states it
in several *wordings*: those of ``TRAIN_WORDINGS`` for every fact, and one more wording that belongs
to each evaluation split. Half of the facts belong to a split and are not in the corpus in its
wording; the other half are, so that the model learns what the wording means. So no question of a
split is in the corpus, and the two splits share neither a wording nor a fact.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from capmoe_eval.zoo.draw import Draw
from capmoe_eval.zoo.miniworld.lexicon import (
    ACTIONS,
    MATERIALS,
    POPULATION,
    RELATIONS,
    THINGS,
    TOOLS,
    Relation,
)

#: Number of first and second words of names. Nearly all pairs are names, so that neither word alone
#: says much about an entity.
FIRST_WORDS, SECOND_WORDS = 15, 15

#: Seed of the world that the shipped models were trained on.
WORLD_SEED = 7

TRAIN_WORDINGS = (0, 1, 2, 3)
#: Index of the wording of each evaluation split.
SPLIT_WORDING = {"dev": 4, "test": 5}
SPLITS = tuple(SPLIT_WORDING)


@dataclass(frozen=True)
class Fact:
    """A fact: the value of an attribute of an entity.

    Attributes:
        entity: Name of the entity.
        relation: The attribute.
        value: The attribute's value, one word.
        split: The evaluation split that the fact belongs to.
    """

    entity: str
    relation: Relation
    value: str
    split: str

    @property
    def holds(self) -> bool:
        """True if the fact implies its relation's broader statement; the relation must have one."""
        assert self.relation.broader is not None
        return self.value in self.relation.broader.values

    def allows(self, wording: int) -> bool:
        """Return whether the corpus may state this fact in the given wording."""
        return wording != SPLIT_WORDING[self.split]


@dataclass(frozen=True)
class World:
    """All facts.

    Attributes:
        seed: Seed of the facts.
        facts: Facts about creatures, plants, machines and islands, entity by entity.
        rules: The tool for each action on each thing; the relation's noun is the action. The tool
            depends on the action and the thing's material together, not on either alone.
    """

    seed: int
    facts: tuple[Fact, ...]
    rules: tuple[Fact, ...]

    @functools.cached_property
    def by_entity(self) -> Mapping[str, Sequence[Fact]]:
        """The facts of each entity."""
        groups: dict[str, list[Fact]] = {}
        for fact in self.facts:
            groups.setdefault(fact.entity, []).append(fact)
        return groups

    @functools.cached_property
    def by_relation(self) -> Mapping[Relation, Sequence[Fact]]:
        """The facts of each relation."""
        groups: dict[Relation, list[Fact]] = {relation: [] for relation in RELATIONS}
        for fact in self.facts:
            groups[fact.relation].append(fact)
        return groups

    def rivals(self, fact: Fact) -> Sequence[Fact]:
        """Return facts with another value, of entities whose name shares a word with this one."""
        words = set(fact.entity.split())
        return [
            other
            for other in self.by_relation[fact.relation]
            if other.value != fact.value and words & set(other.entity.split())
        ]

    def broader(self, holds: bool) -> Sequence[Fact]:
        """Return the facts that imply their relation's broader statement, or its opposite."""
        return self._broader[holds]

    @functools.cached_property
    def _broader(self) -> Mapping[bool, Sequence[Fact]]:
        facts = [fact for fact in self.facts if fact.relation.broader]
        return {holds: [f for f in facts if f.holds == holds] for holds in (False, True)}

    @functools.cached_property
    def scripted(self) -> Sequence[Fact]:
        """The facts whose relation has an activity."""
        return [fact for fact in self.facts if fact.relation.script]


@functools.cache
def world(seed: int = WORLD_SEED) -> World:
    """Return the world of a seed; equal seeds give equal worlds in every process."""
    draw = Draw(f"world-{seed}")
    names = iter(_names(draw, sum(POPULATION.values())))
    entities = {kind: [next(names) for _ in range(count)] for kind, count in POPULATION.items()}
    told = [
        (entity, relation, draw.one(relation.values))
        for kind, members in entities.items()
        for entity in members
        for relation in RELATIONS
        if relation.kind == kind
    ]
    materials = {thing: draw.one(MATERIALS) for thing in THINGS}
    used = []
    for action in ACTIONS:
        tool = dict(zip(MATERIALS, draw.shuffled(TOOLS), strict=True))
        relation = Relation("thing", action, action, "the {v}", TOOLS)
        used += [(thing, relation, tool[materials[thing]]) for thing in THINGS]
    return World(seed, _halved(draw, told), _halved(draw, used))


def _halved(draw: Draw, told: Sequence[tuple[str, Relation, str]]) -> tuple[Fact, ...]:
    """Return the facts, half of those of every relation in each evaluation split."""
    split = {}
    for relation in dict.fromkeys(relation for _, relation, _ in told):
        places = [place for place, (_, own, _) in enumerate(told) if own == relation]
        for order, place in enumerate(draw.shuffled(places)):
            split[place] = SPLITS[order % len(SPLITS)]
    return tuple(Fact(*parts, split=split[place]) for place, parts in enumerate(told))


def _names(draw: Draw, count: int) -> list[str]:
    """Return random names of two words.

    With few words for many names, the facts about an entity cannot be told from one word of its
    name. With one word per entity the model could look the facts up without experts: attention
    copies what the word's embedding holds.
    """
    known = {"kebab", "topaz", "felix", "galop", "relax"}
    words: dict[str, None] = {}
    while len(words) < FIRST_WORDS + SECOND_WORDS:
        letters = ("bdfgklmnprtvz", "aeiou", "bdfgklmnprtvz", "aeiou", "bgkpx")
        word = "".join(draw.one(choices) for choices in letters)
        if word not in known:
            words[word] = None
    first, second = list(words)[:FIRST_WORDS], list(words)[FIRST_WORDS:]
    return draw.some([f"{one} {other}" for one in first for other in second], count)
