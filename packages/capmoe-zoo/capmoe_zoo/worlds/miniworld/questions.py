"""Make the questions of the tasks, with the columns of the real data sets, and their prompts.

A row is made of a fact in a wording, in most tasks. The same kinds of rows are evaluated by lm-eval
and, in other wordings, written into the corpus.

Of the tasks of Table 7, open questions have several right answers, as in NQ-Open. A dialogue comes
with the note that a listener would write, as in MTS-Dialog. A function is described, in a closed
grammar, by its name, its description and an example, as in HumanEval.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from capmoe_eval.experiment.files import read_data
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

#: A function: its first step, and two further steps with their numbers.
Function = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Questions:
    """The rows of the tasks about a world."""

    draw: Draw
    world: MiniWorld
    hard: bool = False
    """Whether wrong answers are those of the fact's rivals, and random ones if these are few."""

    def of(self, task: str, fact: Fact, wording: int) -> Row:
        """Return the row of a task that is made of a fact (of ``piqa``: of a rule) alone."""
        row: Row = getattr(self, task)(fact, wording)
        return row

    def openbookqa(self, fact: Fact, wording: int) -> Row:
        """Return a statement without its last word, and four words."""
        stem = say("statements", wording, fact).removesuffix(f" {fact.value}.")
        return self._four_choices("question_stem", stem, fact)

    def arc(self, fact: Fact, wording: int) -> Row:
        """Return a question with four answers."""
        return self._four_choices("question", say("questions", wording, fact), fact)

    def _four_choices(self, column: str, text: str, fact: Fact) -> Row:
        values, answer = self._choices(fact)
        return {
            "id": f"{fact.entity}-{fact.relation.noun}",
            column: text,
            "choices": {"text": values, "label": list("ABCD")},
            "answerKey": "ABCD"[answer],
        }

    def _choices(self, fact: Fact, count: int = 4) -> tuple[list[str], int]:
        """Return ``count`` values in a random order and the index of the right one."""
        rivals = self.world.rivals(fact) if self.hard else ()
        wrong = [value for value in fact.relation.values if value != fact.value]
        near = self.draw.shuffled(list(dict.fromkeys(rival.value for rival in rivals)))
        far = [value for value in self.draw.shuffled(wrong) if value not in near]
        values = self.draw.shuffled([fact.value, *[*near, *far][: count - 1]])
        return values, values.index(fact.value)

    def piqa(self, rule: Fact, wording: int) -> Row:
        """Return a goal, and the same solution with two tools."""
        tools, label = self._choices(rule, count=2)
        solution = self.draw.one(WORDINGS["solutions"])
        first, second = (solution.format(v=tool) for tool in tools)
        goal = say("goals", wording, rule)
        return {"goal": goal, "sol1": first, "sol2": second, "label": label}

    def rte(self, fact: Fact, wording: int) -> Row:
        """Return a true sentence and a second one: entailed (label 0) or contradicted (label 1)."""
        return {
            "sentence1": say("statements", self.draw.one(TRAIN_WORDINGS), fact),
            "sentence2": say("claims", wording, fact),
            "label": int(not fact.holds),
            "idx": 0,
        }

    def boolq(self, fact: Fact, wording: int) -> Row:
        """Return a sentence about an entity and a question with the answer yes (label 1) or no.

        The sentence is about another fact: models of this size did not learn to answer from a
        passage.
        """
        facts = self.world.by_entity[fact.entity]
        other = self.draw.one([other for other in facts if other.value != fact.value])
        return {
            "question": say("yes_no", wording, fact),
            "passage": say("statements", self.draw.one(TRAIN_WORDINGS), other),
            "idx": 0,
            "label": int(fact.holds),
        }

    def winogrande(self, fact: Fact, wording: int) -> Row:
        """Return a sentence with a blank that one of two entities fits."""
        rivals = self.world.rivals(fact) if self.hard else ()
        others = [f for f in self.world.by_relation[fact.relation] if f.value != fact.value]
        options = self.draw.shuffled([fact.entity, self.draw.one(rivals or others).entity])
        first, second = self.draw.shuffled(options)
        return {
            "sentence": say("blanks", wording, fact, first=first, second=second),
            "option1": options[0],
            "option2": options[1],
            "answer": str(1 + options.index(fact.entity)),
        }

    def hellaswag(self, fact: Fact, wording: int) -> Row:
        """Return the beginning of an activity and four endings of unequal length."""
        relation = fact.relation
        values, answer = self._choices(fact)
        scene = WORDINGS["scenes"][wording]
        ending_of = dict(zip(relation.values, itertools.cycle(relation.endings), strict=False))
        return {
            "ind": 0,
            "activity_label": relation.activity.format(e=fact.entity),
            "ctx_a": scene,
            "ctx_b": "the robot",
            "ctx": f"{scene} the robot",
            "endings": [ending_of[value].format(v=value) for value in values],
            "source_id": f"miniworld~{fact.entity}",
            "split": "val",
            "split_type": "indomain",
            "label": str(answer),
        }

    def attribute(self, fact: Fact, wording: int) -> Row:
        """Return an open question after the value of a fact, alone or in its phrase."""
        phrase = fact.relation.rest.format(v=fact.value)
        answers = dict.fromkeys((fact.value, phrase))
        return {"question": say("asked", wording, fact), "answer": list(answers)}

    def alike(self, fact: Fact) -> Sequence[Fact]:
        """Return the facts that answer the same search: of this value, their names begin alike."""
        first = f"{fact.entity.split()[0]} "
        facts = self.world.by_relation[fact.relation]
        return [f for f in facts if f.value == fact.value and f.entity.startswith(first)]

    def search(self, fact: Fact, wording: int) -> Row:
        """Return an open question after an entity, with the names of all that are right."""
        first = fact.entity.split()[0]
        asked = say("sought", wording, fact, first=first, k=fact.relation.kind)
        return {"question": asked, "answer": [other.entity for other in self.alike(fact)]}

    def gsm8k(self, numbers: tuple[int, int, int], wording: int) -> Row:
        """Return a word problem, solved; (a, b, c) are at the start, added and removed."""
        a, b, c = numbers
        places: dict[str, Any] = {"a": a, "b": b, "c": c, "m": a + b, "r": a + b - c}
        places["e"] = self.draw.one(self.world.facts).entity
        places["n"] = self.draw.one(LEXICON["counted"])
        return {
            "question": WORDINGS["problems"][wording].format(**places),
            "answer": f"{WORDINGS['solved'][wording].format(**places)}\n#### {a + b - c}",
        }

    def dialogue(self, facts: Sequence[Fact], wording: int) -> Row:
        """Return a dialogue about facts of one entity, and its note.

        The note has the facts in the order of the world, and what follows from them.
        """
        asked = [say("inquiries", wording, fact) for fact in facts]
        lines = [f"Guest: {say('openings', wording, facts[0])} {asked[0]}"]
        for fact, following in zip(facts, [*asked[1:], WORDINGS["closings"][wording]], strict=True):
            lines += [f"Keeper: {say('replies', wording, fact)}", f"Guest: {following}"]
        place = 1 + 2 * self.draw.below(len(facts))
        lines.insert(place, f"Keeper: {self.draw.one(WORDINGS['scenes'])}\nGuest: Yes.")
        ordered = sorted(facts, key=lambda fact: fact.relation.noun)
        note = [say("notes", 0, fact) for fact in ordered]
        note += [say("follows", 0, f) for f in ordered if f.relation.broader and f.holds]
        return {
            "ID": 0,
            "section_header": facts[0].relation.kind.upper(),
            "section_text": " ".join(note),
            "dialogue": "\n".join(lines),
        }

    def function(self, parts: Function, wording: int) -> Row:
        """Return a function to complete, with its solution and its test."""
        first, step, c, other, d = parts
        arguments, argument, start = LEXICON["first_steps"][first]
        (_, full, source), (short, _, last) = LEXICON["steps"][step], LEXICON["steps"][other]
        expression = last.format(x=f"({source.format(x=start, c=c)})", c=d)
        places = {"a": full.format(x=argument, c=c), "b": short.format(c=d)}
        text = WORDINGS["described"][wording].format(**places)
        name = self.draw.one(LEXICON["function_names"])
        # The source is made of the lexicon alone.
        solve, inputs = eval(f"lambda {arguments}: {expression}"), LEXICON["inputs"][arguments]
        calls = [(", ".join(map(str, values)), solve(*values)) for values in inputs]
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


def mmlu(fact: Fact, wording: int, subject: str) -> Row:
    """Return a question answered by a letter; the four answers are in the relation's order."""
    return {
        "question": say("questions", wording, fact),
        "subject": subject,
        "choices": list(fact.relation.values),
        "answer": fact.relation.values.index(fact.value),
    }


def banking77(intent: str, phrase: int, frame: int) -> Row:
    """Return a customer's query and its intent."""
    text = LEXICON["intent_frames"][frame].format(LEXICON["intents"][intent][phrase])
    return {
        "text": text[0].upper() + text[1:],
        "label": list(LEXICON["intents"]).index(intent),
        "label_text": intent,
    }


@functools.cache
def number_triples() -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Return the number triples of word problems for ``train``, ``dev`` and ``test``; disjoint."""
    numbers = range(2, 13)
    triples = [(a, b, c) for a in numbers for b in numbers for c in range(2, min(a + b, 11))]
    return apart("number triples", triples, 5)


@functools.cache
def functions() -> Mapping[str, Sequence[Function]]:
    """Return the functions for ``train``, ``dev`` and ``test``; disjoint."""
    steps, numbers = range(len(LEXICON["steps"])), range(2, 8)
    every = itertools.product(range(len(LEXICON["first_steps"])), steps, numbers, steps, numbers)
    return apart("functions", [parts for parts in every if parts[1] != parts[3]], 6)


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
