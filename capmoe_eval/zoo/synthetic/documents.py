"""Generate synthetic documents: the suite's ten data sets in miniature, in simple English.

Every document comes from a template over a small lexicon, which determines its right answer. The
columns are those of the real data sets; their types are in ``hub``. No document of an evaluation
split occurs in a train split.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

Row = dict[str, Any]
#: Rows by split, and splits by configuration.
Splits = Mapping[str, Sequence[Row]]
Configs = Mapping[str, Splits]

#: Documents of an evaluation split (MMLU: four for each subject).
EVALUATION_DOCUMENTS = 16
#: Documents of a train split: ARC-Challenge draws 25 demonstrations from it.
TRAIN_DOCUMENTS = 32
#: MMLU's development split, which lm-eval's ``first_n`` sampler uses whole for 5 shots.
DEV_DOCUMENTS = 5

_T = TypeVar("_T")

_KINDS = {
    "bird": ("robin", "crow", "owl", "duck", "swan", "hawk", "dove", "eagle"),
    "drink": ("tea", "milk", "coffee", "juice", "cocoa", "cider", "lemonade", "wine"),
    "fish": ("trout", "salmon", "cod", "tuna", "herring", "carp", "eel", "pike"),
    "fruit": ("apple", "pear", "plum", "cherry", "melon", "peach", "grape", "mango"),
    "metal": ("iron", "gold", "silver", "copper", "tin", "zinc", "nickel", "steel"),
    "tool": ("hammer", "saw", "drill", "chisel", "spade", "rake", "wrench", "axe"),
    "tree": ("oak", "pine", "birch", "maple", "elm", "willow", "beech", "cedar"),
    "vehicle": ("car", "bus", "train", "boat", "truck", "tram", "bicycle", "van"),
}
_PROPERTIES = {
    "bird": "has feathers and lays eggs",
    "drink": "is poured into a cup",
    "fish": "swims and breathes with gills",
    "fruit": "holds seeds and tastes sweet",
    "metal": "conducts electricity",
    "tool": "helps people to build things",
    "tree": "has a trunk, roots and leaves",
    "vehicle": "carries people along a route",
}
_NAMES = ("Ann", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack")
_CITIES = ("Berlin", "Cairo", "Lima", "London", "Oslo", "Paris", "Rome", "Tokyo")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_COUNTED = ("apples", "books", "coins", "eggs", "pencils", "shells", "stamps", "tickets")

#: Everyday goals, each with a thing that helps and one that does not.
_GOALS = (
    ("cut a wooden board", "a saw", "a pillow"),
    ("dry wet hands", "a towel", "a spoon"),
    ("see in a dark room", "a lamp", "a blanket"),
    ("keep milk cold", "a fridge", "an oven"),
    ("open a locked door", "a key", "a feather"),
    ("drive a nail into a wall", "a hammer", "a sponge"),
    ("stay dry in the rain", "an umbrella", "a comb"),
    ("eat hot soup", "a spoon", "a ladder"),
    ("reach a high shelf", "a ladder", "a carpet"),
    ("sweep a dusty floor", "a broom", "a candle"),
)
#: Activities: label, first action, next action.
_ACTIVITIES = (
    ("Washing a car", "fills a bucket with soapy water", "scrubs the car and rinses off the soap."),
    ("Baking bread", "mixes flour, water and yeast", "kneads the dough and puts it in the oven."),
    ("Planting a tree", "digs a deep hole in the garden", "sets the young tree into the hole."),
    ("Painting a wall", "opens a can of white paint", "rolls the paint onto the wall."),
    ("Making tea", "boils a kettle of water", "pours the water over the tea leaves."),
    ("Brushing teeth", "puts paste on a small brush", "moves the brush over the teeth."),
    ("Reading a book", "sits down and opens a novel", "turns the pages one by one."),
    ("Rowing a boat", "climbs into a boat on a lake", "pulls the oars through the water."),
    ("Building a fire", "piles dry wood in a ring of stones", "lights the wood with a match."),
    ("Playing a drum", "picks up two wooden sticks", "beats the drum with the sticks."),
)
_PEOPLE = (
    ("man", "he"),
    ("woman", "she"),
    ("boy", "he"),
    ("girl", "she"),
    ("farmer", "he"),
    ("nurse", "she"),
)
#: Sentences with one blank, and whether it stands for {first} or {second}.
_BLANKS = (
    ("{first} gave {second} the {thing} because _ had asked for it.", "second"),
    ("{first} gave {second} the {thing} because _ did not need it.", "first"),
    ("{first} paid {second} for the {thing} because _ was the seller.", "second"),
    ("{first} paid {second} for the {thing} because _ was the buyer.", "first"),
    ("{first} showed {second} the {thing} because _ had never seen it.", "second"),
    ("{first} showed {second} the {thing} because _ was proud of it.", "first"),
)
#: Intents of bank customers, each with two phrases. As in BANKING77, one label has a capital
#: letter; the protocol compares labels without regard to case.
_INTENTS = {
    "card_lost": ("I lost my card", "my card is gone"),
    "new_pin": ("I forgot my PIN", "I need a new PIN"),
    "Refund_missing": ("my refund is not there", "the shop did not pay me back"),
    "exchange_rate": ("what is a euro worth today", "I want to know the exchange rate"),
    "card_arrival": ("my new card did not arrive", "when does my card come"),
    "top_up_failed": ("my top up did not work", "I could not add money"),
    "close_account": ("I want to close my account", "please end my account"),
    "cash_limit": ("how much cash can I take out", "what is the cash limit"),
}
_FRAMES = ("{}.", "Hello, {}.", "Good morning, {}.", "Please help me: {}.", "A question: {}.")
_INTENT_SHOTS = 5

MMLU_SUBJECTS = (
    "abstract_algebra",
    "anatomy",
    "astronomy",
    "business_ethics",
    "clinical_knowledge",
    "college_biology",
    "college_chemistry",
    "college_computer_science",
    "college_mathematics",
    "college_medicine",
    "college_physics",
    "computer_security",
    "conceptual_physics",
    "econometrics",
    "electrical_engineering",
    "elementary_mathematics",
    "formal_logic",
    "global_facts",
    "high_school_biology",
    "high_school_chemistry",
    "high_school_computer_science",
    "high_school_european_history",
    "high_school_geography",
    "high_school_government_and_politics",
    "high_school_macroeconomics",
    "high_school_mathematics",
    "high_school_microeconomics",
    "high_school_physics",
    "high_school_psychology",
    "high_school_statistics",
    "high_school_us_history",
    "high_school_world_history",
    "human_aging",
    "human_sexuality",
    "international_law",
    "jurisprudence",
    "logical_fallacies",
    "machine_learning",
    "management",
    "marketing",
    "medical_genetics",
    "miscellaneous",
    "moral_disputes",
    "moral_scenarios",
    "nutrition",
    "philosophy",
    "prehistory",
    "professional_accounting",
    "professional_law",
    "professional_medicine",
    "professional_psychology",
    "public_relations",
    "security_studies",
    "sociology",
    "us_foreign_policy",
    "virology",
    "world_religions",
)


class _Draw:
    """A stream of random choices, the same in every version of Python.

    It uses ``random.Random.random`` alone, the only method whose sequence Python guarantees across
    versions.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random

    def below(self, stop: int) -> int:
        """Return an integer from 0 to ``stop - 1``."""
        return int(self._random() * stop)

    def one(self, items: Sequence[_T]) -> _T:
        """Return a random item."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[_T]) -> list[_T]:
        """Return all items in a random order."""
        return sorted(items, key=lambda _: self._random())

    def some(self, items: Sequence[_T], count: int) -> list[_T]:
        """Return ``count`` different random items."""
        return self.shuffled(items)[:count]


@functools.cache
def documents() -> Mapping[str, Configs]:
    """Return every synthetic document: data set → configuration → split → rows.

    The data sets are named as on the hub. The result is the same in every process and is shared by
    all callers: do not change it.
    """
    return {
        "Rowan/hellaswag": {"default": _splits(_hellaswag, _VALIDATION)},
        "allenai/ai2_arc": {"ARC-Challenge": _splits(_arc, _TEST)},
        "allenai/openbookqa": {"main": _splits(_openbookqa, _TEST)},
        "allenai/winogrande": {"winogrande_xl": _splits(_winogrande, _VALIDATION)},
        "aps/super_glue": {"boolq": _splits(_boolq, _VALIDATION)},
        "baber/piqa": {"default": _splits(_piqa, _VALIDATION)},
        "cais/mmlu": {
            # Each subject has its own seed, because all of them share one template.
            subject: _splits(functools.partial(_mmlu, subject), _SUBJECT, seed=f"_mmlu/{subject}")
            for subject in MMLU_SUBJECTS
        },
        "mteb/banking77": {"default": _banking77()},
        "nyu-mll/glue": {"rte": _splits(_rte, _VALIDATION)},
        "openai/gsm8k": {
            "main": _splits(_gsm8k, {"train": TRAIN_DOCUMENTS, "test": EVALUATION_DOCUMENTS})
        },
    }


def texts() -> Iterator[str]:
    """Yield every string of every document in a fixed order, to train a tokenizer on."""
    for configs in documents().values():
        for splits in configs.values():
            for rows in splits.values():
                yield from _strings(rows)


_VALIDATION = {"train": TRAIN_DOCUMENTS, "validation": EVALUATION_DOCUMENTS}
_TEST = {**_VALIDATION, "test": EVALUATION_DOCUMENTS}
_SUBJECT = {"dev": DEV_DOCUMENTS, "validation": 1, "test": 4}


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _splits(
    document: Callable[[int, _Draw], Row], sizes: Mapping[str, int], seed: str = ""
) -> Splits:
    """Return splits of the given sizes, cut from one stream of different documents.

    The default ``seed`` is the name of the template.
    """
    stream = _different(document, seed or document.__name__)
    return {split: list(islice(stream, size)) for split, size in sizes.items()}


def _different(document: Callable[[int, _Draw], Row], seed: str) -> Iterator[Row]:
    """Yield documents that differ in more than their number and the order of their answers."""
    draw = _Draw(seed)
    seen: set[tuple[str, ...]] = set()
    index = 0
    while True:
        row = document(index, draw)
        number = {"id", "idx", "ind", "source_id"}
        content = {column: value for column, value in row.items() if column not in number}
        key = tuple(sorted(_strings(content)))
        if key not in seen:
            seen.add(key)
            index += 1
            yield row


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _one_of_its_kind(draw: _Draw) -> tuple[str, list[str], int]:
    """Return a random kind, four things of which one is of that kind, and the index of that one."""
    kinds = draw.some(tuple(_KINDS), 4)
    answer = draw.below(4)
    return kinds[answer], [draw.one(_KINDS[kind]) for kind in kinds], answer


def _openbookqa(index: int, draw: _Draw) -> Row:
    kind, things, answer = _one_of_its_kind(draw)
    return {
        "id": f"synthetic-{index}",
        "question_stem": f"A thing that {_PROPERTIES[kind]} could be",
        "choices": {"text": things, "label": list("ABCD")},
        "answerKey": "ABCD"[answer],
    }


def _arc(index: int, draw: _Draw) -> Row:
    kind, things, answer = _one_of_its_kind(draw)
    return {
        "id": f"synthetic-{index}",
        "question": f"Which of these is a {kind}?",
        "choices": {"text": things, "label": list("ABCD")},
        "answerKey": "ABCD"[answer],
    }


def _piqa(_index: int, draw: _Draw) -> Row:
    task, good, bad = draw.one(_GOALS)
    name = draw.one(_NAMES)
    label = draw.below(2)
    solutions = [f"{name} can use {thing}." for thing in (good, bad)]
    return {
        "goal": f"How can {name} {task}?",
        "sol1": solutions[label],
        "sol2": solutions[1 - label],
        "label": label,
    }


def _rte(index: int, draw: _Draw) -> Row:
    kind, other = draw.some(("bird", "fish", "fruit", "tool", "tree", "vehicle"), 2)
    name, city, day = draw.one(_NAMES), draw.one(_CITIES), draw.one(_DAYS)
    label = draw.below(2)
    return {
        "sentence1": f"On {day} {name} painted {_a(draw.one(_KINDS[kind]))} in {city}.",
        "sentence2": f"{name} painted a {(kind, other)[label]}.",
        "label": label,
        "idx": index,
    }


def _winogrande(_index: int, draw: _Draw) -> Row:
    template, blank = draw.one(_BLANKS)
    first, second = draw.some(_NAMES, 2)
    options = draw.shuffled((first, second))
    answer = first if blank == "first" else second
    return {
        "sentence": template.format(first=first, second=second, thing=draw.one(_KINDS["tool"])),
        "option1": options[0],
        "option2": options[1],
        "answer": str(1 + options.index(answer)),
    }


def _boolq(index: int, draw: _Draw) -> Row:
    names = draw.some(_NAMES, 2)
    cities = draw.some(_CITIES, 2)
    things = [draw.one(_KINDS[kind]) for kind in draw.some(("tool", "vehicle"), 2)]
    who, label = draw.below(2), draw.below(2)
    city = cities[who if label else 1 - who]
    passage = " ".join(
        f"{name} lives in {city} and owns {_a(thing)}."
        for name, city, thing in zip(names, cities, things, strict=True)
    )
    return {
        "question": f"does {names[who].lower()} live in {city.lower()}",
        "passage": passage,
        "idx": index,
        "label": label,
    }


def _hellaswag(index: int, draw: _Draw) -> Row:
    # Each pair of an activity and a person occurs once, so that no context is in two splits.
    activity = _ACTIVITIES[index % len(_ACTIVITIES)]
    person, pronoun = _PEOPLE[(index + index // len(_ACTIVITIES)) % len(_PEOPLE)]
    name, start, ending = activity
    others = draw.some([other[2] for other in _ACTIVITIES if other is not activity], 3)
    endings = draw.shuffled([ending, *others])
    before = f"A {person} {start}."
    return {
        "ind": index,
        "activity_label": name,
        "ctx_a": before,
        "ctx_b": pronoun,
        "ctx": f"{before} {pronoun}",
        "endings": endings,
        "source_id": f"synthetic~{index}",
        "split": "val",
        "split_type": "indomain",
        "label": str(endings.index(ending)),
    }


def _mmlu(subject: str, _index: int, draw: _Draw) -> Row:
    asked = 10 + draw.below(40)
    solved = 1 + draw.below(asked - 1)
    right = asked - solved
    choices = draw.shuffled([right, right + 1, right + 2, right + 3])
    name = draw.one(_NAMES)
    return {
        "question": f"A test in {subject.replace('_', ' ')} has {asked} questions and {name} "
        f"answers {solved} of them. How many are left?",
        "subject": subject,
        "choices": [str(choice) for choice in choices],
        "answer": choices.index(right),
    }


def _gsm8k(_index: int, draw: _Draw) -> Row:
    name, things = draw.one(_NAMES), draw.one(_COUNTED)
    bags, each, more = 2 + draw.below(8), 2 + draw.below(8), 1 + draw.below(20)
    packed = bags * each
    total = packed + more
    return {
        "question": f"{name} has {bags} bags with {each} {things} in each bag and finds {more} "
        f"more. How many {things} does {name} have now?",
        "answer": f"The bags hold {bags}*{each} = <<{bags}*{each}={packed}>>{packed} {things}.\n"
        f"{name} has {packed}+{more} = <<{packed}+{more}={total}>>{total} {things} now.\n"
        f"#### {total}",
    }


def _banking77() -> Splits:
    """Return 5 train and 2 test rows for each label, both splits shuffled."""
    draw = _Draw("_banking77")
    train: list[Row] = []
    test: list[Row] = []
    for label, (name, phrases) in enumerate(_INTENTS.items()):
        sentences = [frame.format(phrase) for frame in _FRAMES for phrase in phrases]
        rows = [
            {"text": sentence[0].upper() + sentence[1:], "label": label, "label_text": name}
            for sentence in draw.shuffled(sentences)
        ]
        train += rows[:_INTENT_SHOTS]
        test += rows[_INTENT_SHOTS : _INTENT_SHOTS + EVALUATION_DOCUMENTS // len(_INTENTS)]
    return {"train": draw.shuffled(train), "test": draw.shuffled(test)}
