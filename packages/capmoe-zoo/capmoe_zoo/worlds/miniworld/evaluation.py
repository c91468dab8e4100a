"""Build the evaluation sets of the mini-world, in the layout and with the columns of the real ones.

lm-eval's own tasks read them when ``data.root`` points at the directory, with their own prompts,
shots and metrics. The ``dev`` sets were used to choose worlds and training settings; the ``test``
sets have wordings, facts and number triples of their own and were used for no decision.
"""

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence

from capmoe_eval.zoo.sets import Configs, Row, Splits

from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.miniworld import questions
from capmoe_zoo.worlds.miniworld import world as worlds
from capmoe_zoo.worlds.miniworld.questions import Questions
from capmoe_zoo.worlds.miniworld.world import LEXICON, Fact, Relation

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


def subject_relation(subject: str) -> Relation:
    """Return the relation that the questions of a subject of MMLU are about.

    A relation has as many subjects as one split's half of its facts can supply with documents.
    """
    place: int = LEXICON["subjects"].index(subject)
    population = LEXICON["population"]
    shares = ([each] * (population[each.kind] // 2 // SUBJECT_DOCUMENTS) for each in worlds.SCALES)
    return list(itertools.chain(*shares))[place]


@functools.cache
def documents(split: str = "test", seed: int = worlds.WORLD_SEED) -> Mapping[str, Configs]:
    """Return the sets of ``dev`` or ``test``: data set → configuration → split → rows.

    ``seed`` is the world's.
    """
    return _Sets(split, seed).all()


class _Sets:
    """Builds the sets of one split."""

    def __init__(self, split: str, seed: int) -> None:
        self._world, self._split, self._wording = (
            worlds.world(seed),
            split,
            worlds.SPLIT_WORDING[split],
        )
        more = split == "test" and seed != worlds.WORLD_SEED
        self._count = FURTHER_DOCUMENTS if more else EVALUATION_DOCUMENTS

    def _questions(self, name: str) -> Questions:
        """Return questions with chance of their own."""
        draw = Draw(f"{self._world.seed}-{self._split}-{name}")
        return Questions(draw, self._world, hard=True)

    def all(self) -> Mapping[str, Configs]:
        facts, scripted = self._world.facts, self._world.scripted
        subjects = self._subjects()
        asked = {row["question"] for splits in subjects.values() for row in splits["test"]}
        # ARC and OpenBookQA have a test split; ARC shares no question with MMLU.
        arc = self._splits("arc", facts, taken=asked)
        openbookqa = self._splits("openbookqa", facts)
        # As many open questions after an attribute as after an entity.
        half = GENERATED_DOCUMENTS // 2
        attributes = self._splits("attribute", facts, count=half, name="_attribute")
        searches = self._splits("search", facts, count=half, name="_search")
        return {
            "Rowan/hellaswag": {"default": self._splits("hellaswag", scripted)},
            "allenai/ai2_arc": {"ARC-Challenge": {**arc, "test": arc["validation"]}},
            "allenai/openbookqa": {"main": {**openbookqa, "test": openbookqa["validation"]}},
            "allenai/winogrande": {"winogrande_xl": self._splits("winogrande", facts)},
            "aps/super_glue": {"boolq": self._balanced("boolq")},
            "baber/piqa": {"default": self._splits("piqa", self._world.rules)},
            "cais/mmlu": subjects,
            "mteb/banking77": {"default": self._banking77()},
            "nyu-mll/glue": {"rte": self._balanced("rte")},
            "openai/gsm8k": {"main": self._gsm8k()},
            "google-research-datasets/nq_open": {
                "nq_open": {split: rows + searches[split] for split, rows in attributes.items()}
            },
            "har1/MTS_Dialogue-Clinical_Note": {"default": self._dialogues()},
            "openai/openai_humaneval": {"openai_humaneval": self._functions()},
        }

    def _splits(
        self,
        task: str,
        facts: Sequence[Fact],
        *,
        count: int | None = None,
        name: str = "",
        taken: Collection[str] = (),
    ) -> dict[str, list[Row]]:
        """Return rows of the split's facts in its wording, and train rows in corpus wordings.

        Questions that are ``taken`` are left out. The chance is that of a ``name``, by default the
        task's.
        """
        made, count = self._questions(name or task), count or self._count
        draw = made.draw
        split_facts = [fact for fact in facts if fact.split == self._split]
        rows: list[Row] = []
        while len(rows) < count:  # a second pass draws other wrong answers
            asked = [made.of(task, fact, self._wording) for fact in draw.shuffled(split_facts)]
            rows += [row for row in asked if row.get("question") not in taken and row not in rows]
        examples = draw.some(facts, TRAIN_DOCUMENTS)
        shots = [made.of(task, fact, draw.one(worlds.TRAIN_WORDINGS)) for fact in examples]
        return {
            "train": _numbered([row for row in shots if row.get("question") not in taken]),
            "validation": _numbered(rows[:count]),
        }

    def _balanced(self, task: str) -> Splits:
        """Return splits with as many answers no as yes."""
        no, yes = self._world.broader[False], self._world.broader[True]
        halves = [self._splits(task, half, count=self._count // 2) for half in (no, yes)]
        draw = self._questions(f"{len(no)}-{len(yes)}").draw
        return {
            split: _numbered(draw.shuffled(rows + halves[1][split]))
            for split, rows in halves[0].items()
        }

    def _subjects(self) -> Configs:
        taken: set[Fact] = set()
        configs = {}
        for subject in LEXICON["subjects"]:
            draw = self._questions(subject).draw
            facts = draw.shuffled(self._world.by_relation[subject_relation(subject)])
            free = [fact for fact in facts if fact.split == self._split and fact not in taken]
            asked = free[:SUBJECT_DOCUMENTS]
            taken |= set(asked)
            rows = [questions.mmlu(fact, self._wording, subject) for fact in asked]
            shots = [
                questions.mmlu(fact, draw.one(worlds.TRAIN_WORDINGS), subject)
                for fact in draw.some(facts, DEV_DOCUMENTS)
            ]
            configs[subject] = {"dev": shots, "validation": rows, "test": rows}
        return configs

    def _gsm8k(self) -> Splits:
        made, triples = self._questions("gsm8k"), questions.number_triples()
        draw = made.draw
        asked: list[Row] = []
        while len(asked) < self._count:
            shuffled = draw.shuffled(triples[self._split])
            asked += [made.gsm8k(numbers, self._wording) for numbers in shuffled]
        examples = draw.some(triples["train"], TRAIN_DOCUMENTS)
        shots = [made.gsm8k(numbers, draw.one(worlds.TRAIN_WORDINGS)) for numbers in examples]
        return {"train": shots, "test": asked[: self._count]}

    def _dialogues(self) -> Splits:
        made = self._questions("dialogues")
        draw = made.draw
        entities = draw.shuffled(list(self._world.by_entity))

        def rows(names: Sequence[str], wordings: Sequence[int]) -> Sequence[Row]:
            about = (draw.some(self._world.by_entity[name], 3 + draw.below(2)) for name in names)
            dialogues = [made.dialogue(facts, draw.one(wordings)) for facts in about]
            return [row | {"ID": place} for place, row in enumerate(dialogues)]

        train_names, asked = entities[:TRAIN_DOCUMENTS], entities[TRAIN_DOCUMENTS:]
        test = rows(asked[:GENERATED_DOCUMENTS], [self._wording])
        return {"train": rows(train_names, worlds.TRAIN_WORDINGS), "validation": test, "test": test}

    def _functions(self) -> Splits:
        made = self._questions("functions")
        functions = questions.functions()[self._split][:GENERATED_DOCUMENTS]
        return {"test": [made.function(function, self._wording) for function in functions]}

    def _banking77(self) -> Splits:
        """Return 5 train rows of each intent, and a test row of each of its phrases."""
        draw = self._questions("banking77").draw
        shots, asked = [], []
        for intent, phrases in LEXICON["intents"].items():
            numbers = range(len(phrases))
            places = itertools.product(numbers, worlds.TRAIN_WORDINGS)
            shots += draw.some([questions.banking77(intent, *place) for place in places], 5)
            asked += [questions.banking77(intent, number, self._wording) for number in numbers]
        return {"train": draw.shuffled(shots), "test": draw.shuffled(asked)}


def _numbered(rows: Sequence[Row]) -> list[Row]:
    """Return the rows numbered in the columns ``ind`` and ``idx``, where they have them."""
    return [
        row | {column: place for column in ("ind", "idx") if column in row}
        for place, row in enumerate(rows)
    ]
