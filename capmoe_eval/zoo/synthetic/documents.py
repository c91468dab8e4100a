"""Generate synthetic documents: the thirteen data sets in miniature, in simple English.

Every document comes from a template over the words of ``words.yaml``, which determines its right
answer. The columns are those of the real data sets; their types are in ``columns.yaml``. No
document of an evaluation split occurs in a train split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.zoo.draw import Draw

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

_WORDS = read_data(__package__, "words.yaml", dict[str, Any])
_KINDS: Mapping[str, Sequence[str]] = _WORDS["kinds"]
_NAMES: Sequence[str] = _WORDS["names"]
_CITIES: Sequence[str] = _WORDS["cities"]
MMLU_SUBJECTS: Sequence[str] = tuple(_WORDS["mmlu_subjects"])


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
        "google-research-datasets/nq_open": {"nq_open": _splits(_nq_open, _VALIDATION)},
        "har1/MTS_Dialogue-Clinical_Note": {"default": _splits(_mts_dialog, _TEST)},
        "openai/openai_humaneval": {
            "openai_humaneval": _splits(_humaneval, {"test": EVALUATION_DOCUMENTS})
        },
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
    """Return the strings of the documents in a fixed order, to train a tokenizer on.

    Those of Table 7 came later and are left out, so that the tokenizer stays what it was.
    """
    generated = ("google-research-datasets/", "har1/", "openai/openai_humaneval")
    return _strings({k: v for k, v in documents().items() if not k.startswith(generated)})


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
    document: Callable[[int, Draw], Row], sizes: Mapping[str, int], seed: str = ""
) -> Splits:
    """Return splits of the given sizes, cut from one stream of different documents.

    The default ``seed`` is the name of the template.
    """
    stream = _different(document, seed or document.__name__)
    return {split: list(islice(stream, size)) for split, size in sizes.items()}


def _different(document: Callable[[int, Draw], Row], seed: str) -> Iterator[Row]:
    """Yield documents that differ in more than their number and the order of their answers."""
    draw = Draw(seed)
    seen: set[tuple[str, ...]] = set()
    index = 0
    while True:
        row = document(index, draw)
        number = {"ID", "id", "idx", "ind", "source_id", "task_id"}
        content = {column: value for column, value in row.items() if column not in number}
        key = tuple(sorted(_strings(content)))
        if key not in seen:
            seen.add(key)
            index += 1
            yield row


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _one_of_its_kind(draw: Draw) -> tuple[str, Row]:
    """Return a random kind, and the columns of four choices of which one is of that kind."""
    kinds = draw.some(tuple(_KINDS), 4)
    answer = draw.below(4)
    things = [draw.one(_KINDS[kind]) for kind in kinds]
    choices = {"text": things, "label": list("ABCD")}
    return kinds[answer], {"choices": choices, "answerKey": "ABCD"[answer]}


def _openbookqa(index: int, draw: Draw) -> Row:
    kind, answer = _one_of_its_kind(draw)
    stem = f"A thing that {_WORDS['properties'][kind]} could be"
    return {"id": f"synthetic-{index}", "question_stem": stem, **answer}


def _arc(index: int, draw: Draw) -> Row:
    kind, answer = _one_of_its_kind(draw)
    return {"id": f"synthetic-{index}", "question": f"Which of these is a {kind}?", **answer}


def _piqa(_index: int, draw: Draw) -> Row:
    task, good, bad = draw.one(_WORDS["goals"])
    name = draw.one(_NAMES)
    label = draw.below(2)
    solutions = [f"{name} can use {thing}." for thing in (good, bad)]
    return {
        "goal": f"How can {name} {task}?",
        "sol1": solutions[label],
        "sol2": solutions[1 - label],
        "label": label,
    }


def _rte(index: int, draw: Draw) -> Row:
    kind, other = draw.some(("bird", "fish", "fruit", "tool", "tree", "vehicle"), 2)
    name, city, day = draw.one(_NAMES), draw.one(_CITIES), draw.one(_WORDS["days"])
    label = draw.below(2)
    return {
        "sentence1": f"On {day} {name} painted {_a(draw.one(_KINDS[kind]))} in {city}.",
        "sentence2": f"{name} painted a {(kind, other)[label]}.",
        "label": label,
        "idx": index,
    }


def _winogrande(_index: int, draw: Draw) -> Row:
    template, blank = draw.one(_WORDS["blanks"])
    first, second = draw.some(_NAMES, 2)
    options = draw.shuffled((first, second))
    answer = first if blank == "first" else second
    return {
        "sentence": template.format(first=first, second=second, thing=draw.one(_KINDS["tool"])),
        "option1": options[0],
        "option2": options[1],
        "answer": str(1 + options.index(answer)),
    }


def _boolq(index: int, draw: Draw) -> Row:
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


def _hellaswag(index: int, draw: Draw) -> Row:
    # Each pair of an activity and a person occurs once, so that no context is in two splits.
    activities, people = _WORDS["activities"], _WORDS["people"]
    activity = activities[index % len(activities)]
    person, pronoun = people[(index + index // len(activities)) % len(people)]
    name, start, ending = activity
    others = draw.some([other[2] for other in activities if other is not activity], 3)
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


def _mmlu(subject: str, _index: int, draw: Draw) -> Row:
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


def _gsm8k(_index: int, draw: Draw) -> Row:
    name, things = draw.one(_NAMES), draw.one(_WORDS["counted"])
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


def _nq_open(_index: int, draw: Draw) -> Row:
    kind, city, name = draw.one(tuple(_KINDS)), draw.one(_CITIES), draw.one(_NAMES)
    asked = f"name a {kind} that {name.lower()} can find in {city.lower()}"
    return {"question": asked, "answer": list(_KINDS[kind])}


def _mts_dialog(index: int, draw: Draw) -> Row:
    name, city, day = draw.one(_NAMES), draw.one(_CITIES), draw.one(_WORDS["days"])
    return {
        "ID": index,
        "section_header": "GENHX",
        "section_text": f"{name} lives in {city}. The pain began on {day}.",
        "dialogue": f"Doctor: Who are you?\nPatient: {name}, from {city}.\n"
        f"Doctor: When did the pain begin?\nPatient: On {day}.",
    }


def _humaneval(index: int, draw: Draw) -> Row:
    more, times = 1 + draw.below(20), 2 + draw.below(8)
    return {
        "task_id": f"synthetic/{index}",
        "prompt": f'def change(x):\n    """Add {more} to x and multiply by {times}."""\n',
        "entry_point": "change",
        "canonical_solution": f"    return (x + {more}) * {times}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {(1 + more) * times}\n",
    }


def _banking77() -> Splits:
    """Return 5 train and 2 test rows for each of 8 labels, both splits shuffled."""
    draw = Draw("_banking77")
    train: list[Row] = []
    test: list[Row] = []
    for label, (name, phrases) in enumerate(_WORDS["intents"].items()):
        sentences = [frame.format(phrase) for frame in _WORDS["frames"] for phrase in phrases]
        rows = [
            {"text": sentence[0].upper() + sentence[1:], "label": label, "label_text": name}
            for sentence in draw.shuffled(sentences)
        ]
        train += rows[:5]
        test += rows[5:7]
    return {"train": draw.shuffled(train), "test": draw.shuffled(test)}
