"""Build the evaluation sets of the mini-world, in the layout and with the columns of the real ones.

lm-eval's own tasks read them when ``data.root`` points at the directory, with their own prompts,
shots and metrics. The ``dev`` sets were used to choose worlds and training settings; the ``test``
sets have wordings, facts and number triples of their own and were used for no decision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from capmoe_eval.errors import bad_choice
from capmoe_eval.zoo.draw import Draw
from capmoe_eval.zoo.miniworld import questions
from capmoe_eval.zoo.miniworld.lexicon import INTENT_FRAMES, INTENTS, POPULATION, SCALES, Relation
from capmoe_eval.zoo.miniworld.questions import Row
from capmoe_eval.zoo.miniworld.world import (
    SPLIT_WORDING,
    SPLITS,
    TRAIN_WORDINGS,
    Fact,
    World,
    world,
)
from capmoe_eval.zoo.synthetic.documents import MMLU_SUBJECTS, Configs, Splits
from capmoe_eval.zoo.synthetic.hub import cached_hub, write_documents

#: Evaluated documents of a task.
EVALUATION_DOCUMENTS = 300
#: Evaluated documents of each of the 57 subjects of MMLU.
SUBJECT_DOCUMENTS = 6
#: Documents to draw the shots from; ARC-Challenge draws 25.
TRAIN_DOCUMENTS = 64
#: MMLU's demonstrations per subject; lm-eval shows all of them.
DEV_DOCUMENTS = 5

Numbers = tuple[int, int, int]


@functools.cache
def number_triples() -> Mapping[str, Sequence[Numbers]]:
    """Return the number triples of word problems for ``train``, ``dev`` and ``test``; disjoint."""
    triples = [
        (a, b, c) for a in range(2, 13) for b in range(2, 13) for c in range(2, min(a + b, 11))
    ]
    mixed = Draw("number triples").shuffled(triples)
    held = len(mixed) // 5
    return {"dev": mixed[:held], "test": mixed[held : 2 * held], "train": mixed[2 * held :]}


def subject_relation(subject: str) -> Relation:
    """Return the relation that the questions of a subject of MMLU are about.

    A relation has as many subjects as one split's half of its facts can supply with documents.
    """
    shares = [
        relation
        for relation in SCALES
        for _ in range(POPULATION[relation.kind] // 2 // SUBJECT_DOCUMENTS)
    ]
    return shares[MMLU_SUBJECTS.index(subject)]


@functools.cache
def documents(split: str = "test", seed: int | None = None) -> Mapping[str, Configs]:
    """Return the evaluation sets: data set → configuration → split → rows.

    Args:
        split: ``dev`` or ``test``.
        seed: Seed of the world; None for the world of the shipped models.

    Raises:
        UsageError: If the split is unknown.
    """
    if split not in SPLITS:
        raise bad_choice("split", split, SPLITS)
    known = world() if seed is None else world(seed)
    return _Sets(known, split).all()


def miniworld_hub(split: str = "test") -> Path:
    """Return the directory of the evaluation sets in the user's cache, written if it is absent.

    Args:
        split: ``dev`` or ``test``.

    Raises:
        UsageError: If the split is unknown.
        OSError: If the cache cannot be written.
    """
    return cached_hub(f"miniworld-{split}", documents(split), title=f"mini-world, {split}")


def write_miniworld(directory: Path, split: str = "test") -> None:
    """Write the evaluation sets under ``directory``, in the layout of the Hugging Face hub.

    Args:
        directory: The directory for ``data.root``; it is created, and files in it are replaced.
        split: ``dev`` or ``test``.

    Raises:
        UsageError: If the split is unknown.
        OSError: If a file cannot be written.
    """
    write_documents(directory, documents(split), title=f"mini-world, {split}")


class _Sets:
    """Builds the sets of one split."""

    def __init__(self, known: World, split: str) -> None:
        self._world = known
        self._split = split
        self._wording = SPLIT_WORDING[split]

    def all(self) -> Mapping[str, Configs]:
        facts, rules, scripted = self._world.facts, self._world.rules, self._world.scripted
        claims = (self._world.broader(False), self._world.broader(True))
        known = self._world
        subjects = self._subjects()
        asked = {row["question"] for splits in subjects.values() for row in splits["test"]}

        def arc(fact: Fact, wording: int, draw: Draw) -> Row | None:
            row = questions.arc(fact, wording, draw, known.rivals(fact))
            return None if row["question"] in asked else row  # ARC shares no question with MMLU

        def boolq(fact: Fact, wording: int, draw: Draw) -> Row:
            return questions.boolq(fact, wording, draw, known)

        def winogrande(fact: Fact, wording: int, draw: Draw) -> Row:
            return questions.winogrande(fact, wording, draw, known, known.rivals(fact))

        def openbookqa(fact: Fact, wording: int, draw: Draw) -> Row:
            return questions.openbookqa(fact, wording, draw, known.rivals(fact))

        def hellaswag(fact: Fact, wording: int, draw: Draw) -> Row:
            return questions.hellaswag(fact, wording, draw, known.rivals(fact))

        return {
            "Rowan/hellaswag": {"default": self._splits(hellaswag, scripted)},
            "allenai/ai2_arc": {"ARC-Challenge": self._splits(arc, facts, test=True)},
            "allenai/openbookqa": {"main": self._splits(openbookqa, facts, test=True)},
            "allenai/winogrande": {"winogrande_xl": self._splits(winogrande, facts)},
            "aps/super_glue": {"boolq": self._balanced(boolq, *claims)},
            "baber/piqa": {"default": self._splits(questions.piqa, rules)},
            "cais/mmlu": subjects,
            "mteb/banking77": {"default": self._banking77()},
            "nyu-mll/glue": {"rte": self._balanced(questions.rte, *claims)},
            "openai/gsm8k": {"main": self._gsm8k()},
        }

    def _splits(
        self,
        question: Callable[[Fact, int, Draw], Row | None],
        facts: Sequence[Fact],
        *,
        test: bool = False,
        count: int = EVALUATION_DOCUMENTS,
    ) -> Splits:
        """Return rows of the split's facts in its wording, and train rows in corpus wordings."""
        name = getattr(question, "__name__", "question")
        draw = Draw(f"{self._world.seed}-{self._split}-{name}")
        own = [fact for fact in facts if fact.split == self._split]
        rows: list[Row] = []
        while len(rows) < count:  # a second pass draws other wrong answers
            asked = (question(fact, self._wording, draw) for fact in draw.shuffled(own))
            rows += [row for row in asked if row is not None and row not in rows]
        shown = [
            question(fact, draw.one(TRAIN_WORDINGS), draw)
            for fact in draw.some(facts, TRAIN_DOCUMENTS)
        ]
        splits = {
            "train": _numbered([row for row in shown if row is not None]),
            "validation": _numbered(rows[:count]),
        }
        return {**splits, "test": splits["validation"]} if test else splits

    def _balanced(
        self,
        question: Callable[[Fact, int, Draw], Row],
        no: Sequence[Fact],
        yes: Sequence[Fact],
    ) -> Splits:
        """Return splits with as many answers no as yes."""
        halves = [
            self._splits(question, half, count=EVALUATION_DOCUMENTS // 2) for half in (no, yes)
        ]
        draw = Draw(f"{self._world.seed}-{self._split}-{len(no)}-{len(yes)}")
        return {
            split: _numbered(draw.shuffled([row for half in halves for row in half[split]]))
            for split in halves[0]
        }

    def _subjects(self) -> Configs:
        taken: set[Fact] = set()
        configs = {}
        for subject in MMLU_SUBJECTS:
            draw = Draw(f"{self._world.seed}-{self._split}-{subject}")
            facts = draw.shuffled(self._world.by_relation[subject_relation(subject)])
            own = [f for f in facts if f.split == self._split and f not in taken]
            taken |= set(own[:SUBJECT_DOCUMENTS])
            rows = [
                questions.mmlu(fact, self._wording, subject) for fact in own[:SUBJECT_DOCUMENTS]
            ]
            shown = [
                questions.mmlu(fact, draw.one(TRAIN_WORDINGS), subject)
                for fact in draw.some(facts, DEV_DOCUMENTS)
            ]
            configs[subject] = {"dev": shown, "validation": rows, "test": rows}
        return configs

    def _gsm8k(self) -> Splits:
        draw = Draw(f"{self._world.seed}-{self._split}-gsm8k")
        triples = number_triples()
        asked: list[Row] = []
        while len(asked) < EVALUATION_DOCUMENTS:
            asked += [
                questions.gsm8k(numbers, self._wording, draw, self._world)
                for numbers in draw.shuffled(triples[self._split])
            ]
        shown = [
            questions.gsm8k(numbers, draw.one(TRAIN_WORDINGS), draw, self._world)
            for numbers in draw.some(triples["train"], TRAIN_DOCUMENTS)
        ]
        return {"train": shown, "test": asked[:EVALUATION_DOCUMENTS]}

    def _banking77(self) -> Splits:
        """Return 5 train rows of each intent, and a test row of each of its phrases."""
        draw = Draw(f"{self._world.seed}-{self._split}-banking77")
        frame = SPLIT_WORDING[self._split]
        shown, asked = [], []
        for intent, phrases in INTENTS.items():
            everything = [
                questions.banking77(intent, phrase, usual)
                for phrase in range(len(phrases))
                for usual in range(len(INTENT_FRAMES))
                if usual in TRAIN_WORDINGS
            ]
            shown += draw.some(everything, 5)
            asked += [questions.banking77(intent, phrase, frame) for phrase in range(len(phrases))]
        return {"train": draw.shuffled(shown), "test": draw.shuffled(asked)}


def _numbered(rows: Sequence[Row]) -> list[Row]:
    """Return the rows numbered in the columns ``ind`` and ``idx``, where they have them."""
    return [
        row | {column: place for column in ("ind", "idx") if column in row}
        for place, row in enumerate(rows)
    ]
