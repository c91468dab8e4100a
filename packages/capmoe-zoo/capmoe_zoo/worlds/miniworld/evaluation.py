"""Build the evaluation sets of the mini-world, in the layout and with the columns of the real ones.

lm-eval's own tasks read them when ``data.root`` points at the directory, with their own prompts,
shots and metrics. The ``dev`` sets were used to choose worlds and training settings; the ``test``
sets have wordings, facts and number triples of their own and were used for no decision.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from capmoe_eval.errors import check_choice
from capmoe_eval.zoo.sets import Configs, Row, Splits

from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.miniworld import questions
from capmoe_zoo.worlds.miniworld.world import (
    LEXICON,
    SPLIT_WORDING,
    SPLITS,
    TRAIN_WORDINGS,
    WORLD_SEED,
    Fact,
    MiniWorld,
    Relation,
    apart,
    world,
)

#: Evaluated documents of a task.
EVALUATION_DOCUMENTS = 300
#: The same of test sets in a world of another seed: what the margin of claim (c) needs.
FURTHER_DOCUMENTS = 1200
#: Evaluated documents of the tasks of Table 7, which write their answers token by token.
GENERATED_DOCUMENTS = 164
#: Evaluated documents of each of the 57 subjects of MMLU.
SUBJECT_DOCUMENTS = 6
#: Documents to draw the shots from; ARC-Challenge draws 25.
TRAIN_DOCUMENTS = 64
#: MMLU's demonstrations per subject; lm-eval shows all of them.
DEV_DOCUMENTS = 5

_QUESTIONS: Mapping[str, questions.Question] = {
    **questions.OF_A_FACT,
    "_attribute": questions.open_question,
    "_search": questions.search,
}


@functools.cache
def number_triples() -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Return the number triples of word problems for ``train``, ``dev`` and ``test``; disjoint."""
    triples = [
        (a, b, c) for a in range(2, 13) for b in range(2, 13) for c in range(2, min(a + b, 11))
    ]
    return apart("number triples", triples, 5)


def subject_relation(subject: str) -> Relation:
    """Return the relation that the questions of a subject of MMLU are about.

    A relation has as many subjects as one split's half of its facts can supply with documents.
    """
    shares = [
        relation
        for relation in LEXICON.scales
        for _ in range(LEXICON.population[relation.kind] // 2 // SUBJECT_DOCUMENTS)
    ]
    return shares[LEXICON.subjects.index(subject)]


@functools.cache
def documents(split: str = "test", seed: int = WORLD_SEED) -> Mapping[str, Configs]:
    """Return the sets of ``dev`` or ``test``: data set → configuration → split → rows.

    ``seed`` is the world's.
    """
    check_choice("split", split, SPLITS)
    return _Sets(world(seed), split).all()


@dataclass(frozen=True)
class _Sets:
    """Builds the sets of one split."""

    _world: MiniWorld
    _split: str

    @property
    def _wording(self) -> int:
        return SPLIT_WORDING[self._split]

    @property
    def _count(self) -> int:
        more = self._split == "test" and self._world.seed != WORLD_SEED
        return FURTHER_DOCUMENTS if more else EVALUATION_DOCUMENTS

    def _draw(self, name: str) -> Draw:
        return Draw(f"{self._world.seed}-{self._split}-{name}")

    def all(self) -> Mapping[str, Configs]:
        facts, rules, scripted = self._world.facts, self._world.rules, self._world.scripted
        subjects = self._subjects()
        asked = {row["question"] for splits in subjects.values() for row in splits["test"]}
        # ARC and OpenBookQA have a test split; ARC shares no question with MMLU.
        arc = self._splits("arc", facts, taken=asked)
        openbookqa = self._splits("openbookqa", facts)
        return {
            "Rowan/hellaswag": {"default": self._splits("hellaswag", scripted)},
            "allenai/ai2_arc": {"ARC-Challenge": {**arc, "test": arc["validation"]}},
            "allenai/openbookqa": {"main": {**openbookqa, "test": openbookqa["validation"]}},
            "allenai/winogrande": {"winogrande_xl": self._splits("winogrande", facts)},
            "aps/super_glue": {"boolq": self._balanced("boolq")},
            "baber/piqa": {"default": self._splits("piqa", rules)},
            "cais/mmlu": subjects,
            "mteb/banking77": {"default": self._banking77()},
            "nyu-mll/glue": {"rte": self._balanced("rte")},
            "openai/gsm8k": {"main": self._gsm8k()},
            "google-research-datasets/nq_open": {"nq_open": self._open()},
            "har1/MTS_Dialogue-Clinical_Note": {"default": self._dialogues()},
            "openai/openai_humaneval": {"openai_humaneval": self._functions()},
        }

    def _splits(
        self,
        name: str,
        facts: Sequence[Fact],
        *,
        count: int | None = None,
        taken: frozenset[str] | set[str] = frozenset(),
    ) -> dict[str, Sequence[Row]]:
        """Return rows of the split's facts in its wording, and train rows in corpus wordings.

        Questions that are ``taken`` are left out.
        """
        draw, count = self._draw(name), count or self._count

        def ask(fact: Fact, wording: int) -> Row:
            return _QUESTIONS[name](fact, wording, draw, self._world, True)

        split_facts = [fact for fact in facts if fact.split == self._split]
        rows: list[Row] = []
        while len(rows) < count:  # a second pass draws other wrong answers
            asked = [ask(fact, self._wording) for fact in draw.shuffled(split_facts)]
            rows += [row for row in asked if row.get("question") not in taken and row not in rows]
        shots = [ask(fact, draw.one(TRAIN_WORDINGS)) for fact in draw.some(facts, TRAIN_DOCUMENTS)]
        return {
            "train": _numbered([row for row in shots if row.get("question") not in taken]),
            "validation": _numbered(rows[:count]),
        }

    def _balanced(self, name: str) -> Splits:
        """Return splits with as many answers no as yes."""
        no, yes = self._world.broader[False], self._world.broader[True]
        halves = [self._splits(name, half, count=self._count // 2) for half in (no, yes)]
        draw = self._draw(f"{len(no)}-{len(yes)}")
        return {
            split: _numbered(draw.shuffled([row for half in halves for row in half[split]]))
            for split in halves[0]
        }

    def _subjects(self) -> Configs:
        taken: set[Fact] = set()
        configs = {}
        for subject in LEXICON.subjects:
            draw = self._draw(subject)
            facts = draw.shuffled(self._world.by_relation[subject_relation(subject)])
            subject_facts = [
                fact for fact in facts if fact.split == self._split and fact not in taken
            ]
            subject_facts = subject_facts[:SUBJECT_DOCUMENTS]
            taken |= set(subject_facts)
            rows = [questions.mmlu(fact, self._wording, subject) for fact in subject_facts]
            shots = [
                questions.mmlu(fact, draw.one(TRAIN_WORDINGS), subject)
                for fact in draw.some(facts, DEV_DOCUMENTS)
            ]
            configs[subject] = {"dev": shots, "validation": rows, "test": rows}
        return configs

    def _gsm8k(self) -> Splits:
        draw, triples = self._draw("gsm8k"), number_triples()
        asked: list[Row] = []
        while len(asked) < self._count:
            asked += [
                questions.gsm8k(numbers, self._wording, draw, self._world)
                for numbers in draw.shuffled(triples[self._split])
            ]
        shots = [
            questions.gsm8k(numbers, draw.one(TRAIN_WORDINGS), draw, self._world)
            for numbers in draw.some(triples["train"], TRAIN_DOCUMENTS)
        ]
        return {"train": shots, "test": asked[: self._count]}

    def _open(self) -> Splits:
        """Return open questions, as many after an attribute as after an entity."""
        attributes, searches = (
            self._splits(name, self._world.facts, count=GENERATED_DOCUMENTS // 2)
            for name in ("_attribute", "_search")
        )
        return {split: [*rows, *searches[split]] for split, rows in attributes.items()}

    def _dialogues(self) -> Splits:
        draw = self._draw("dialogues")
        entities = draw.shuffled(list(self._world.by_entity))

        def rows(names: Sequence[str], wordings: Sequence[int]) -> Sequence[Row]:
            about = (draw.some(self._world.by_entity[name], 3 + draw.below(2)) for name in names)
            made = [questions.dialogue(facts, draw.one(wordings), draw) for facts in about]
            return [row | {"ID": place} for place, row in enumerate(made)]

        train_names, asked = entities[:TRAIN_DOCUMENTS], entities[TRAIN_DOCUMENTS:]
        test = rows(asked[:GENERATED_DOCUMENTS], [self._wording])
        return {"train": rows(train_names, TRAIN_WORDINGS), "validation": test, "test": test}

    def _functions(self) -> Splits:
        draw = self._draw("functions")
        functions = questions.functions()[self._split][:GENERATED_DOCUMENTS]
        return {
            "test": [questions.function(function, self._wording, draw) for function in functions]
        }

    def _banking77(self) -> Splits:
        """Return 5 train rows of each intent, and a test row of each of its phrases."""
        draw = self._draw("banking77")
        shots, asked = [], []
        for intent, phrases in LEXICON.intents.items():
            everything = [
                questions.banking77(intent, phrase, frame)
                for phrase in range(len(phrases))
                for frame in TRAIN_WORDINGS
            ]
            shots += draw.some(everything, 5)
            asked += [questions.banking77(intent, p, self._wording) for p in range(len(phrases))]
        return {"train": draw.shuffled(shots), "test": draw.shuffled(asked)}


def _numbered(rows: Sequence[Row]) -> list[Row]:
    """Return the rows numbered in the columns ``ind`` and ``idx``, where they have them."""
    return [
        row | {column: place for column in ("ind", "idx") if column in row}
        for place, row in enumerate(rows)
    ]
