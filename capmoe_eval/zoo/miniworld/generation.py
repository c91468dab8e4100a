"""Make documents of the three tasks of Table 7, as rows with the columns of the real data sets.

Open questions have several right answers, as in NQ-Open. A dialogue comes with the note that a
listener would write, as in MTS-Dialog. A function is described, in a closed grammar, by its name,
its description and an example, as in HumanEval.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from capmoe_eval.zoo.draw import Draw
from capmoe_eval.zoo.miniworld.lexicon import WORDINGS
from capmoe_eval.zoo.miniworld.world import Fact, World, apart, say
from capmoe_eval.zoo.synthetic.documents import Row

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


def open_question(fact: Fact, wording: int, draw: Draw, known: World, hard: bool) -> Row:
    """Return a question after the value of a fact, alone or in its phrase."""
    phrase = fact.relation.rest.format(v=fact.value)
    answers = dict.fromkeys((fact.value, phrase))
    return {"question": say(WORDINGS.asked[wording], fact), "answer": list(answers)}


def alike(fact: Fact, known: World) -> Sequence[Fact]:
    """Return the facts that answer the same search: of this value, their names begin alike."""
    first = fact.entity.split()[0]
    return [
        other
        for other in known.by_relation[fact.relation]
        if other.value == fact.value and other.entity.split()[0] == first
    ]


def search(fact: Fact, wording: int, draw: Draw, known: World, hard: bool) -> Row:
    """Return a question after an entity, with the names of all that are right."""
    first = fact.entity.split()[0]
    asked = say(WORDINGS.sought[wording], fact, first=first, k=fact.relation.kind)
    return {"question": asked, "answer": [other.entity for other in alike(fact, known)]}


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
    return apart("functions", [own for own in every if own[1] != own[3]], 6)


def function(parts: Function, wording: int, draw: Draw) -> Row:
    """Return a function to complete, with its solution and its test."""
    first, one, c, other, d = parts
    arguments, argument, start, _ = _FIRST[first]
    expression = _STEPS[one][2].format(x=start, c=c)
    expression = _STEPS[other][2].format(x=f"({expression})", c=d)
    text = WORDINGS.described[wording].format(
        a=_STEPS[one][1].format(x=argument, c=c), b=_STEPS[other][0].format(c=d)
    )
    name = draw.one(_NAMES)
    calls = []
    for numbers in _INPUTS[arguments]:
        call = str(numbers) if arguments == "items" else ", ".join(map(str, numbers))
        calls.append((call, _value(parts, numbers)))
    (shown, result), *tested = calls
    asserts = "".join(f"    assert candidate({call}) == {value}\n" for call, value in tested)
    return {
        "task_id": f"miniworld/{'-'.join(map(str, parts))}",
        "prompt": f'def {name}({arguments}):\n    """{text}\n'
        f'    >>> {name}({shown})\n    {result}\n    """\n',
        "entry_point": name,
        "canonical_solution": f"    return {expression}\n",
        "test": f"def check(candidate):\n{asserts}",
    }


def _value(parts: Function, numbers: Sequence[int]) -> int:
    """Return the result of a function, computed without its source."""
    first, one, c, other, d = parts
    return _STEPS[other][3](_STEPS[one][3](_FIRST[first][3](numbers), c), d)
