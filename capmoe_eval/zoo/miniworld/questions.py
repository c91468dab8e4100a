"""Make questions of the ten tasks, as rows with the columns of the real data sets.

Every function makes one row from a fact in a wording. The same kinds of rows are evaluated by
lm-eval and, in other wordings, written into the corpus. The wrong answers of a hard question are
those of the fact's rivals, and random ones where there are too few rivals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from capmoe_eval.zoo.draw import Draw
from capmoe_eval.zoo.miniworld.lexicon import LEXICON, WORDINGS
from capmoe_eval.zoo.miniworld.world import TRAIN_WORDINGS, Fact, World, say
from capmoe_eval.zoo.synthetic.documents import Row

#: Makes a row of a fact, in a wording, about a world, hard or not.
Question = Callable[[Fact, int, Draw, World, bool], Row]


def openbookqa(fact: Fact, wording: int, draw: Draw, known: World, hard: bool) -> Row:
    """Return a statement without its last word, and four words."""
    stem = say(WORDINGS.statements[wording], fact).removesuffix(f" {fact.value}.")
    return _four_choices("question_stem", stem, fact, draw, known, hard)


def arc(fact: Fact, wording: int, draw: Draw, known: World, hard: bool) -> Row:
    """Return a question with four answers."""
    question = say(WORDINGS.questions[wording], fact)
    return _four_choices("question", question, fact, draw, known, hard)


def _four_choices(column: str, text: str, fact: Fact, draw: Draw, known: World, hard: bool) -> Row:
    values, answer = _choices(fact, draw, known, hard)
    return {
        "id": f"{fact.entity}-{fact.relation.noun}",
        column: text,
        "choices": {"text": values, "label": list("ABCD")},
        "answerKey": "ABCD"[answer],
    }


def _choices(
    fact: Fact, draw: Draw, known: World, hard: bool, count: int = 4
) -> tuple[list[str], int]:
    """Return ``count`` values in a random order and the index of the right one."""
    rivals = known.rivals(fact) if hard else ()
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


def piqa(rule: Fact, wording: int, draw: Draw, known: World, hard: bool) -> Row:
    """Return a goal, and the same solution with two tools."""
    tools, label = _choices(rule, draw, known, hard, count=2)
    solution = draw.one(WORDINGS.solutions)
    return {
        "goal": say(WORDINGS.goals[wording], rule),
        "sol1": solution.format(v=tools[0]),
        "sol2": solution.format(v=tools[1]),
        "label": label,
    }


def rte(fact: Fact, wording: int, draw: Draw, known: World, hard: bool) -> Row:
    """Return a true sentence and a second one: entailed (label 0) or contradicted (label 1)."""
    return {
        "sentence1": say(WORDINGS.statements[draw.one(TRAIN_WORDINGS)], fact),
        "sentence2": say(WORDINGS.claims[wording], fact),
        "label": int(not fact.holds),
        "idx": 0,
    }


def boolq(fact: Fact, wording: int, draw: Draw, known: World, hard: bool) -> Row:
    """Return a sentence about an entity and a question with the answer yes (label 1) or no.

    The sentence is about another fact: models of this size did not learn to answer from a passage.
    """
    other = draw.one([other for other in known.by_entity[fact.entity] if other.value != fact.value])
    return {
        "question": say(WORDINGS.yes_no[wording], fact),
        "passage": say(WORDINGS.statements[draw.one(TRAIN_WORDINGS)], other),
        "idx": 0,
        "label": int(fact.holds),
    }


def winogrande(fact: Fact, wording: int, draw: Draw, known: World, hard: bool) -> Row:
    """Return a sentence with a blank that one of two entities fits."""
    rivals = known.rivals(fact) if hard else ()
    others = [f for f in known.by_relation[fact.relation] if f.value != fact.value]
    options = draw.shuffled([fact.entity, draw.one(rivals or others).entity])
    first, second = draw.shuffled(options)
    return {
        "sentence": say(WORDINGS.blanks[wording], fact, first=first, second=second),
        "option1": options[0],
        "option2": options[1],
        "answer": str(1 + options.index(fact.entity)),
    }


def hellaswag(fact: Fact, wording: int, draw: Draw, known: World, hard: bool) -> Row:
    """Return the beginning of an activity and four endings of unequal length."""
    script = fact.relation.script
    assert script is not None
    values, answer = _choices(fact, draw, known, hard)
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


def gsm8k(numbers: tuple[int, int, int], wording: int, draw: Draw, known: World) -> Row:
    """Return a word problem with its solution; (a, b, c) are at the start, added and removed."""
    a, b, c = numbers
    question, solution = WORDINGS.problems[wording]
    places = {
        **{"a": a, "b": b, "c": c, "m": a + b, "r": a + b - c},
        **{"e": draw.one(known.facts).entity, "n": draw.one(LEXICON.counted)},
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
