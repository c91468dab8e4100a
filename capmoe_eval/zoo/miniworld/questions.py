"""Make questions of the ten tasks, as rows with the columns of the real data sets.

Every function makes one row from a fact in a wording. The same kinds of rows are evaluated by
lm-eval and, in other wordings, written into the corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capmoe_eval.zoo.draw import Draw
from capmoe_eval.zoo.miniworld.lexicon import COUNTED, INTENT_FRAMES, INTENTS
from capmoe_eval.zoo.miniworld.wordings import (
    BLANKS,
    CLAIMS,
    GOALS,
    PROBLEMS,
    QUESTIONS,
    SCENES,
    SOLUTIONS,
    STATEMENTS,
    YES_NO,
    say,
)
from capmoe_eval.zoo.miniworld.world import TRAIN_WORDINGS, Fact, World

Row = dict[str, Any]

LETTERS = "ABCD"


def _choices(
    fact: Fact, draw: Draw, count: int = 4, rivals: Sequence[Fact] = ()
) -> tuple[list[str], int]:
    """Return ``count`` values in a random order and the index of the right one.

    The wrong values are those of the rivals, and random ones where there are too few rivals.
    """
    wrong = [value for value in fact.relation.values if value != fact.value]
    near = draw.shuffled(list(dict.fromkeys(rival.value for rival in rivals)))
    far = [value for value in draw.shuffled(wrong) if value not in near]
    values = draw.shuffled([fact.value, *[*near, *far][: count - 1]])
    return values, values.index(fact.value)


def openbookqa(fact: Fact, wording: int, draw: Draw, rivals: Sequence[Fact] = ()) -> Row:
    """Return a statement without its last word, and four words."""
    values, answer = _choices(fact, draw, rivals=rivals)
    statement = say(STATEMENTS[wording], fact)
    return {
        "id": f"{fact.entity}-{fact.relation.noun}",
        "question_stem": statement.removesuffix(f" {fact.value}."),
        "choices": {"text": values, "label": list(LETTERS)},
        "answerKey": LETTERS[answer],
    }


def arc(fact: Fact, wording: int, draw: Draw, rivals: Sequence[Fact] = ()) -> Row:
    """Return a question with four answers."""
    values, answer = _choices(fact, draw, rivals=rivals)
    return {
        "id": f"{fact.entity}-{fact.relation.noun}",
        "question": say(QUESTIONS[wording], fact),
        "choices": {"text": values, "label": list(LETTERS)},
        "answerKey": LETTERS[answer],
    }


def mmlu(fact: Fact, wording: int, subject: str) -> Row:
    """Return a question answered by a letter; the four answers are in the relation's order."""
    return {
        "question": say(QUESTIONS[wording], fact),
        "subject": subject,
        "choices": list(fact.relation.values),
        "answer": fact.relation.values.index(fact.value),
    }


def piqa(rule: Fact, wording: int, draw: Draw) -> Row:
    """Return a goal, and the same solution with two tools."""
    tools, label = _choices(rule, draw, 2)
    solution = draw.one(SOLUTIONS)
    return {
        "goal": say(GOALS[wording], rule),
        "sol1": solution.format(v=tools[0]),
        "sol2": solution.format(v=tools[1]),
        "label": label,
    }


def rte(fact: Fact, wording: int, draw: Draw) -> Row:
    """Return a true sentence and a second one: entailed (label 0) or contradicted (label 1)."""
    return {
        "sentence1": say(STATEMENTS[draw.one(TRAIN_WORDINGS)], fact),
        "sentence2": say(CLAIMS[wording], fact),
        "label": int(not fact.holds),
        "idx": 0,
    }


def boolq(fact: Fact, wording: int, draw: Draw, world: World) -> Row:
    """Return a sentence about an entity and a question with the answer yes (label 1) or no.

    The sentence is about another fact: models of this size did not learn to answer from a passage.
    """
    other = draw.one([other for other in world.by_entity[fact.entity] if other != fact])
    return {
        "question": say(YES_NO[wording], fact),
        "passage": say(STATEMENTS[draw.one(TRAIN_WORDINGS)], other),
        "idx": 0,
        "label": int(fact.holds),
    }


def winogrande(
    fact: Fact, wording: int, draw: Draw, world: World, rivals: Sequence[Fact] = ()
) -> Row:
    """Return a sentence with a blank that one of two entities fits."""
    others = [f for f in world.by_relation[fact.relation] if f.value != fact.value]
    options = draw.shuffled([fact.entity, draw.one(rivals or others).entity])
    first, second = draw.shuffled(options)
    return {
        "sentence": say(BLANKS[wording], fact, first=first, second=second),
        "option1": options[0],
        "option2": options[1],
        "answer": str(1 + options.index(fact.entity)),
    }


def hellaswag(fact: Fact, wording: int, draw: Draw, rivals: Sequence[Fact] = ()) -> Row:
    """Return the beginning of an activity and four endings of unequal length."""
    script = fact.relation.script
    assert script is not None
    values, answer = _choices(fact, draw, rivals=rivals)
    place = fact.relation.values.index
    endings = [
        script.endings[place(value) % len(script.endings)].format(v=value) for value in values
    ]
    return {
        "ind": 0,
        "activity_label": script.activity.format(e=fact.entity),
        "ctx_a": SCENES[wording],
        "ctx_b": "the robot",
        "ctx": f"{SCENES[wording]} the robot",
        "endings": endings,
        "source_id": f"miniworld~{fact.entity}",
        "split": "val",
        "split_type": "indomain",
        "label": str(answer),
    }


def gsm8k(numbers: tuple[int, int, int], wording: int, draw: Draw, world: World) -> Row:
    """Return a word problem with its solution; (a, b, c) are at the start, added and removed."""
    a, b, c = numbers
    question, solution = PROBLEMS[wording]
    places = {
        **{"a": a, "b": b, "c": c, "m": a + b, "r": a + b - c},
        **{"e": draw.one(world.facts).entity, "n": draw.one(COUNTED)},
    }
    return {
        "question": question.format(**places),
        "answer": f"{solution.format(**places)}\n#### {a + b - c}",
    }


def banking77(intent: str, phrase: int, frame: int) -> Row:
    """Return a customer's query and its intent."""
    text = INTENT_FRAMES[frame].format(INTENTS[intent][phrase])
    return {
        "text": text[0].upper() + text[1:],
        "label": list(INTENTS).index(intent),
        "label_text": intent,
    }
