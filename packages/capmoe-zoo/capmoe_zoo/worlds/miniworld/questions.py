"""Make the questions of the tasks, with the columns of the real data sets, and their prompts.

Every function makes one row, most from a fact in a wording. The same kinds of rows are evaluated by
lm-eval and, in other wordings, written into the corpus. The wrong answers of a hard question are
those of the fact's rivals, and random ones where there are too few rivals.

Of the tasks of Table 7, open questions have several right answers, as in NQ-Open. A dialogue comes
with the note that a listener would write, as in MTS-Dialog. A function is described, in a closed
grammar, by its name, its description and an example, as in HumanEval.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.zoo.sets import Row

from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.miniworld.world import (
    LEXICON,
    TRAIN_WORDINGS,
    WORDINGS,
    Fact,
    MiniWorld,
    apart,
    say,
)

#: Makes a row of a fact, in a wording, about a world, hard or not.
Question = Callable[[Fact, int, Draw, MiniWorld, bool], Row]


def openbookqa(fact: Fact, wording: int, draw: Draw, world: MiniWorld, hard: bool) -> Row:
    """Return a statement without its last word, and four words."""
    stem = say(WORDINGS.statements[wording], fact).removesuffix(f" {fact.value}.")
    return _four_choices("question_stem", stem, fact, draw, world, hard)


def arc(fact: Fact, wording: int, draw: Draw, world: MiniWorld, hard: bool) -> Row:
    """Return a question with four answers."""
    question = say(WORDINGS.questions[wording], fact)
    return _four_choices("question", question, fact, draw, world, hard)


def _four_choices(
    column: str, text: str, fact: Fact, draw: Draw, world: MiniWorld, hard: bool
) -> Row:
    values, answer = _choices(fact, draw, world, hard)
    return {
        "id": f"{fact.entity}-{fact.relation.noun}",
        column: text,
        "choices": {"text": values, "label": list("ABCD")},
        "answerKey": "ABCD"[answer],
    }


def _choices(
    fact: Fact, draw: Draw, world: MiniWorld, hard: bool, count: int = 4
) -> tuple[list[str], int]:
    """Return ``count`` values in a random order and the index of the right one."""
    rivals = world.rivals(fact) if hard else ()
    wrong = [value for value in fact.relation.values if value != fact.value]
    near = draw.shuffled(list(dict.fromkeys(rival.value for rival in rivals)))
    far = [value for value in draw.shuffled(wrong) if value not in near]
    values = draw.shuffled([fact.value, *[*near, *far][: count - 1]])
    return values, values.index(fact.value)


def mmlu(fact: Fact, wording: int, subject: str) -> Row:
    """Return a question answered by a letter; the four answers are in the relation's order."""
    return {
        "question": say(WORDINGS.questions[wording], fact),
        "subject": subject,
        "choices": list(fact.relation.values),
        "answer": fact.relation.values.index(fact.value),
    }


def piqa(rule: Fact, wording: int, draw: Draw, world: MiniWorld, hard: bool) -> Row:
    """Return a goal, and the same solution with two tools."""
    tools, label = _choices(rule, draw, world, hard, count=2)
    solution = draw.one(WORDINGS.solutions)
    return {
        "goal": say(WORDINGS.goals[wording], rule),
        "sol1": solution.format(v=tools[0]),
        "sol2": solution.format(v=tools[1]),
        "label": label,
    }


def rte(fact: Fact, wording: int, draw: Draw, world: MiniWorld, hard: bool) -> Row:
    """Return a true sentence and a second one: entailed (label 0) or contradicted (label 1)."""
    return {
        "sentence1": say(WORDINGS.statements[draw.one(TRAIN_WORDINGS)], fact),
        "sentence2": say(WORDINGS.claims[wording], fact),
        "label": int(not fact.holds),
        "idx": 0,
    }


def boolq(fact: Fact, wording: int, draw: Draw, world: MiniWorld, hard: bool) -> Row:
    """Return a sentence about an entity and a question with the answer yes (label 1) or no.

    The sentence is about another fact: models of this size did not learn to answer from a passage.
    """
    other = draw.one([other for other in world.by_entity[fact.entity] if other.value != fact.value])
    return {
        "question": say(WORDINGS.yes_no[wording], fact),
        "passage": say(WORDINGS.statements[draw.one(TRAIN_WORDINGS)], other),
        "idx": 0,
        "label": int(fact.holds),
    }


def winogrande(fact: Fact, wording: int, draw: Draw, world: MiniWorld, hard: bool) -> Row:
    """Return a sentence with a blank that one of two entities fits."""
    rivals = world.rivals(fact) if hard else ()
    others = [f for f in world.by_relation[fact.relation] if f.value != fact.value]
    options = draw.shuffled([fact.entity, draw.one(rivals or others).entity])
    first, second = draw.shuffled(options)
    return {
        "sentence": say(WORDINGS.blanks[wording], fact, first=first, second=second),
        "option1": options[0],
        "option2": options[1],
        "answer": str(1 + options.index(fact.entity)),
    }


def hellaswag(fact: Fact, wording: int, draw: Draw, world: MiniWorld, hard: bool) -> Row:
    """Return the beginning of an activity and four endings of unequal length."""
    script = fact.relation.script
    assert script is not None
    values, answer = _choices(fact, draw, world, hard)
    scene, place = WORDINGS.scenes[wording], fact.relation.values.index
    endings = [
        script.endings[place(value) % len(script.endings)].format(v=value) for value in values
    ]
    return {
        "ind": 0,
        "activity_label": script.activity.format(e=fact.entity),
        "ctx_a": scene,
        "ctx_b": "the robot",
        "ctx": f"{scene} the robot",
        "endings": endings,
        "source_id": f"miniworld~{fact.entity}",
        "split": "val",
        "split_type": "indomain",
        "label": str(answer),
    }


def gsm8k(numbers: tuple[int, int, int], wording: int, draw: Draw, world: MiniWorld) -> Row:
    """Return a word problem with its solution; (a, b, c) are at the start, added and removed."""
    a, b, c = numbers
    question, solution = WORDINGS.problems[wording]
    places = {
        **{"a": a, "b": b, "c": c, "m": a + b, "r": a + b - c},
        **{"e": draw.one(world.facts).entity, "n": draw.one(LEXICON.counted)},
    }
    return {
        "question": question.format(**places),
        "answer": f"{solution.format(**places)}\n#### {a + b - c}",
    }


def banking77(intent: str, phrase: int, frame: int) -> Row:
    """Return a customer's query and its intent."""
    text = LEXICON.intent_frames[frame].format(LEXICON.intents[intent][phrase])
    return {
        "text": text[0].upper() + text[1:],
        "label": list(LEXICON.intents).index(intent),
        "label_text": intent,
    }


#: The questions that are made of a fact or a rule alone, by task.
OF_A_FACT: Mapping[str, Question] = {
    "arc": arc,
    "boolq": boolq,
    "hellaswag": hellaswag,
    "openbookqa": openbookqa,
    "piqa": piqa,
    "rte": rte,
    "winogrande": winogrande,
}


# First steps of a function: its arguments, the step in words and in Python, and its result.
_FIRST: Sequence[tuple[str, str, str, Callable[[Any], int]]] = (
    ("x", "x", "x", sum),
    ("x, y", "the larger of x and y", "max(x, y)", max),
    ("x, y", "the smaller of x and y", "min(x, y)", min),
    ("x, y", "the sum of x and y", "(x + y)", sum),
    ("x, y", "the product of x and y", "(x * y)", math.prod),
    ("items", "the largest of the items", "max(items)", max),
    ("items", "the smallest of the items", "min(items)", min),
    ("items", "the sum of the items", "sum(items)", sum),
    ("items", "the number of the items", "len(items)", len),
)
# Further steps: in short, in full, in Python, and their result.
_STEPS: Sequence[tuple[str, str, str, Callable[[int, int], int]]] = (
    ("add {c}", "add {c} to {x}", "{x} + {c}", operator.add),
    ("subtract {c}", "subtract {c} from {x}", "{x} - {c}", operator.sub),
    ("multiply by {c}", "multiply {x} by {c}", "{x} * {c}", operator.mul),
)
# The example of a function and the inputs of its test, by its arguments.
_INPUTS = {
    "x": ([5], [0], [1], [11]),
    "x, y": ([3, 7], [1, 2], [9, 4], [6, 6]),
    "items": ([4, 9, 6], [1, 2], [8, 3, 5], [7]),
}
_NAMES = ("change", "work", "step", "count", "make", "turn", "form", "result")

#: A function: its first step, and two further steps with their numbers.
Function = tuple[int, int, int, int, int]


def open_question(fact: Fact, wording: int, draw: Draw, world: MiniWorld, hard: bool) -> Row:
    """Return a question after the value of a fact, alone or in its phrase."""
    phrase = fact.relation.rest.format(v=fact.value)
    answers = dict.fromkeys((fact.value, phrase))
    return {"question": say(WORDINGS.asked[wording], fact), "answer": list(answers)}


def alike(fact: Fact, world: MiniWorld) -> Sequence[Fact]:
    """Return the facts that answer the same search: of this value, their names begin alike."""
    first = fact.entity.split()[0]
    return [
        other
        for other in world.by_relation[fact.relation]
        if other.value == fact.value and other.entity.split()[0] == first
    ]


def search(fact: Fact, wording: int, draw: Draw, world: MiniWorld, hard: bool) -> Row:
    """Return a question after an entity, with the names of all that are right."""
    first = fact.entity.split()[0]
    asked = say(WORDINGS.sought[wording], fact, first=first, k=fact.relation.kind)
    return {"question": asked, "answer": [other.entity for other in alike(fact, world)]}


def dialogue(facts: Sequence[Fact], wording: int, draw: Draw) -> Row:
    """Return a dialogue about facts of one entity, and its note.

    The note has the facts in the order of the world, and what follows from them.
    """
    opening, question, answer, closing = WORDINGS.talks[wording]
    lines = [f"Guest: {say(opening, facts[0])} {say(question, facts[0])}"]
    for fact, following in itertools.zip_longest(facts, facts[1:]):
        lines.append(f"Keeper: {say(answer, fact)}")
        lines.append(f"Guest: {say(question, following) if following else closing}")
    place = 1 + 2 * draw.below(len(facts))
    lines.insert(place, f"Keeper: {draw.one(WORDINGS.scenes)}\nGuest: Yes.")
    ordered = sorted(facts, key=lambda fact: fact.relation.noun)
    note = [say(WORDINGS.note, fact) for fact in ordered]
    note += [
        say(WORDINGS.follows, fact) for fact in ordered if fact.relation.broader and fact.holds
    ]
    return {
        "ID": 0,
        "section_header": facts[0].relation.kind.upper(),
        "section_text": " ".join(note),
        "dialogue": "\n".join(lines),
    }


@functools.cache
def functions() -> Mapping[str, Sequence[Function]]:
    """Return the functions for ``train``, ``dev`` and ``test``; disjoint."""
    steps, numbers = range(len(_STEPS)), range(2, 8)
    every = itertools.product(range(len(_FIRST)), steps, numbers, steps, numbers)
    return apart("functions", [parts for parts in every if parts[1] != parts[3]], 6)


def function(parts: Function, wording: int, draw: Draw) -> Row:
    """Return a function to complete, with its solution and its test."""
    first, step, c, other, d = parts
    arguments, argument, start, _ = _FIRST[first]
    expression = _STEPS[step][2].format(x=start, c=c)
    expression = _STEPS[other][2].format(x=f"({expression})", c=d)
    text = WORDINGS.described[wording].format(
        a=_STEPS[step][1].format(x=argument, c=c), b=_STEPS[other][0].format(c=d)
    )
    name = draw.one(_NAMES)
    calls = []
    for numbers in _INPUTS[arguments]:
        call = str(numbers) if arguments == "items" else ", ".join(map(str, numbers))
        calls.append((call, _value(parts, numbers)))
    (example, result), *tested = calls
    asserts = "".join(f"    assert candidate({call}) == {value}\n" for call, value in tested)
    return {
        "task_id": f"miniworld/{'-'.join(map(str, parts))}",
        "prompt": f'def {name}({arguments}):\n    """{text}\n'
        f'    >>> {name}({example})\n    {result}\n    """\n',
        "entry_point": name,
        "canonical_solution": f"    return {expression}\n",
        "test": f"def check(candidate):\n{asserts}",
    }


def _value(parts: Function, numbers: Sequence[int]) -> int:
    """Return the result of a function, computed without its source."""
    first, step, c, other, d = parts
    return _STEPS[other][3](_STEPS[step][3](_FIRST[first][3](numbers), c), d)


#: A prompt and its continuation, the answer.
PromptAndAnswer = tuple[str, str]

#: Separator between two demonstrations, where it is not a line break.
BETWEEN = "\n\n"
#: Text before the first of the open questions.
OPEN_DESCRIPTION = "Answer these questions:\n\n"

_ENVIRONMENT = jinja2.Environment(keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
_TEMPLATES = {
    task: [_ENVIRONMENT.from_string(text) for text in texts]
    for task, texts in read_data(__package__, "prompts.yaml", dict[str, tuple[str, str]]).items()
}


def prompt(task: str, row: Row) -> PromptAndAnswer:
    """Return the prompt of a row and its answer, by a task of ``prompts.yaml``."""
    asked, answer = _TEMPLATES[task]
    return asked.render(row), answer.render(row)


def mmlu_description(subject: str) -> str:
    """Return the text before the first question of a subject."""
    title = subject.replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {title}.\n\n"
