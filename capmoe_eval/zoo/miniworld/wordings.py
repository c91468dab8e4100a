"""The templates of sentences: six wordings of every kind.

The first four are in the corpus for every fact; the fifth is the wording of the ``dev`` split and
the sixth that of ``test``; see :mod:`capmoe_eval.zoo.miniworld.world`. In a wording, ``{e}`` is the
entity, ``{v}`` the value, ``{n}`` the attribute's noun and ``{s}`` the verb phrase in the third
person ("lives in the marsh").
"""

from __future__ import annotations

from capmoe_eval.zoo.miniworld.world import Fact

#: Statements end in the value, so that cutting it off leaves a question.
STATEMENTS = (
    "The {e} {s}.",
    "The {n} of the {e} is {v}.",
    "Every {e} {s}.",
    "We know that the {e} {s}.",
    "For the {e}, the {n} is {v}.",
    "It is true that the {e} {s}.",
)
QUESTIONS = (
    "What is the {n} of the {e}?",
    "The {e} has which {n}?",
    "Which {n} goes with the {e}?",
    "Say the {n} of the {e}.",
    "For the {e}, what is the {n}?",
    "Name the {n} that the {e} has.",
)
#: General statements implied by a fact: ``{p}`` is their verb phrase, ``{q}`` its base form.
CLAIMS = (
    "The {e} {p}.",
    "So the {e} {p}.",
    "Every {e} {p}.",
    "We know that the {e} {p}.",
    "It follows that the {e} {p}.",
    "It is true that the {e} {p}.",
)
#: The same as yes-or-no questions, in lower case and without a question mark as in BoolQ.
YES_NO = (
    "does the {e} {q}",
    "is it a fact that the {e} {p}",
    "is it true that the {e} {p}",
    "can we say that the {e} {p}",
    "do you think that the {e} {p}",
    "would you say that the {e} {p}",
)
#: Sentences about two entities; ``{s}`` is true only of the entity that fits the blank.
BLANKS = (
    "The {first} met the {second}, but only the _ {s}.",
    "The {first} saw the {second} and knew that the _ {s}.",
    "The {first} is not like the {second} because the _ {s}.",
    "Near the {first} was the {second}, and it is the _ that {s}.",
    "The {first} and the {second} differ, since the _ {s}.",
    "Of the {first} and the {second}, it is the _ that {s}.",
)
#: Goals; ``{n}`` is the action.
GOALS = (
    "How do you {n} the {e}?",
    "What is the way to {n} the {e}?",
    "Can you tell how to {n} the {e}?",
    "How can a robot {n} the {e}?",
    "What do you need to {n} the {e}?",
    "Which thing will {n} the {e}?",
)
#: Solutions do not depend on the goal's wording.
SOLUTIONS = ("Use the {v}.", "Take the {v}.", "Get the {v} and begin.")
#: Statements of a rule; they end in the value.
RULES = ("To {n} the {e}, use the {v}.", "If you {n} the {e}, take the {v}.")
#: First sentence of an activity.
SCENES = (
    "A robot starts its work early.",
    "The day is warm and dry.",
    "A small robot comes by.",
    "There is a lot to do.",
    "It is a quiet morning.",
    "The sky is clear today.",
)
#: Word problems: the text, and the solution. ``{a}`` things, ``{b}`` added, ``{c}`` removed.
PROBLEMS = (
    (
        "The {e} has {a} {n}. It finds {b} more and loses {c}. How many {n} are left?",
        "The {e} gets {a} + {b} = {m} {n}. It keeps {m} - {c} = {r}.",
    ),
    (
        "There are {a} {n} in a bag. The {e} adds {b} and takes {c} out. How many are in the bag?",
        "First {a} + {b} = {m} {n}. Then {m} - {c} = {r} {n}.",
    ),
    (
        "The {e} buys {a} {n} and then {b} {n}. It sells {c}. How many {n} does it have?",
        "{a} + {b} = {m}. {m} - {c} = {r}.",
    ),
    (
        "A box holds {a} {n} and a pot {b}. The {e} eats {c} of them. How many {n} are there now?",
        "There were {a} + {b} = {m}. Now there are {m} - {c} = {r} {n}.",
    ),
    (
        "With {a} {n} the {e} begins. It gets {b} and gives {c} away. How many {n} does it keep?",
        "It had {a} + {b} = {m} {n} and keeps {m} - {c} = {r}.",
    ),
    (
        "The {e} puts {a} {n} and {b} {n} into a box. Then {c} fall out. How many {n} are left?",
        "The box had {a} + {b} = {m}. So {m} - {c} = {r} {n} are left.",
    ),
)


def say(wording: str, fact: Fact, **more: str) -> str:
    """Return a wording filled with a fact.

    Args:
        wording: A template of this module.
        fact: The fact.
        **more: Values of further fields of the template.
    """
    relation, broader = fact.relation, fact.relation.broader
    rest = relation.rest.format(v=fact.value)
    claim = (
        {}
        if broader is None
        else {
            "p": f"{broader.verb}s {broader.rest}",
            "q": f"{broader.verb} {broader.rest}",
        }
    )
    return wording.format(
        e=fact.entity, v=fact.value, n=relation.noun, s=f"{relation.verb}s {rest}", **claim, **more
    )
