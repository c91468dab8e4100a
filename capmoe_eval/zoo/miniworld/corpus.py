"""Generate the training corpus: statements of facts, and questions in the prompts of lm-eval.

Most documents are short; a few have as many questions as the prompts of the evaluation, so that the
model has seen 5, 10 or 25 demonstrations. Questions of the evaluation sets never occur:
:mod:`capmoe_eval.zoo.miniworld.world` says how they are kept out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from capmoe_eval.zoo.draw import Draw
from capmoe_eval.zoo.miniworld import prompts, questions
from capmoe_eval.zoo.miniworld.evaluation import number_triples, subject_relation
from capmoe_eval.zoo.miniworld.lexicon import INTENTS
from capmoe_eval.zoo.miniworld.prompts import BETWEEN, Shown
from capmoe_eval.zoo.miniworld.wordings import RULES, STATEMENTS, say
from capmoe_eval.zoo.miniworld.world import TRAIN_WORDINGS, Fact, World
from capmoe_eval.zoo.synthetic.documents import MMLU_SUBJECTS

#: Shares of the short documents in the first part of a training, where facts are learned.
SHORT = {
    "facts": 32.0,
    "rules": 3.0,
    "arc": 18.0,
    "mmlu": 13.0,
    "piqa": 5.0,
    "rte": 7.0,
    "boolq": 14.0,
    "winogrande": 4.0,
    "hellaswag": 8.0,
    "gsm8k": 5.0,
}
#: The same in the second part. Answers that are a letter, yes or no are learned after the facts and
#: need more documents, because such a question has one token with a loss in about thirty.
LATE = {
    "facts": 14.0,
    "rules": 2.0,
    "arc": 8.0,
    "mmlu": 28.0,
    "piqa": 3.0,
    "rte": 12.0,
    "boolq": 28.0,
    "winogrande": 3.0,
    "hellaswag": 9.0,
    "gsm8k": 6.0,
}
#: Shares of the long documents.
LONG = {
    "arc": 1.0,
    "mmlu": 2.0,
    "winogrande": 1.0,
    "hellaswag": 1.0,
    "gsm8k": 1.0,
    "banking77": 0.3,
}
#: Number of questions in a long document: the shots of the evaluation plus one.
QUESTIONS = {"arc": 26, "mmlu": 6, "winogrande": 6, "hellaswag": 11, "gsm8k": 6, "banking77": 12}
#: Largest number of questions in a short document; 1 for the tasks that are not named.
_FEW = {"arc": 4, "mmlu": 3, "rte": 3, "boolq": 4, "winogrande": 3, "hellaswag": 2}
# Share of the questions of short documents without their passage, to learn more per token.
_BARE = {"rte": 0.2, "boolq": 0.6}


@dataclass(frozen=True)
class Document:
    """A text of the corpus.

    Attributes:
        parts: (piece of the text, whether it has a loss) in order. Text that cannot be predicted,
            such as the next question, has no loss. Every piece ends at the end of a word.
    """

    parts: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(part for part, _ in self.parts)


def corpus(
    known: World, seed: int, *, long: bool = False, late: bool = False
) -> Iterator[Document]:
    """Yield documents without end.

    Args:
        known: The world that they are about.
        seed: Seed of the documents.
        long: True for long documents (about 100 to 400 tokens), False for short ones.
        late: Whether short documents have the shares of the second part of a training.
    """
    shares = LATE if late else SHORT
    writer = _Writer(known, Draw(f"corpus-{known.seed}-{seed}-{long}"))
    yield from (writer.long() if long else writer.short(shares) for _ in count())


class _Writer:
    def __init__(self, known: World, draw: Draw) -> None:
        self._world = known
        self._draw = draw
        self._triples = number_triples()["train"]

    def short(self, shares: Mapping[str, float]) -> Document:
        task = self._draw.one_of(tuple(shares), tuple(shares.values()))
        number = 1 + self._draw.below(_FEW.get(task, 1))
        return self.document(task, number, titled=self._draw.chance(0.2), plain=False)

    def long(self) -> Document:
        task = self._draw.one_of(tuple(LONG), tuple(LONG.values()))
        return self.document(task, QUESTIONS[task], titled=True, plain=True)

    def document(self, task: str, number: int, *, titled: bool, plain: bool) -> Document:
        """Return a document.

        Args:
            task: A key of :data:`SHORT` or :data:`LONG`.
            number: Number of questions; not used for ``facts`` and ``rules``.
            titled: Whether questions of MMLU follow their subject's title.
            plain: Whether every question has its passage, as in the evaluation.
        """
        if task == "facts":
            return _document(self._facts(), "", " ")
        if task == "rules":
            return _document(self._rules(), "", " ")
        title = ""
        if task == "banking77":
            shown = prompts.banking77(self._queries(number))
            return _document(shown, "", "")
        if task == "mmlu":
            subject = self._draw.one(MMLU_SUBJECTS)
            title = prompts.mmlu_description(subject) if titled else ""
            shown = [self._mmlu(subject) for _ in range(number)]
        else:
            shown = [self._question(task, plain=plain) for _ in range(number)]
        return _document(shown, title, BETWEEN)

    def _wording(self, fact: Fact) -> int:
        """Return a random wording that the corpus may use for the fact."""
        wording = self._draw.below(len(STATEMENTS))
        return wording if fact.allows(wording) else self._draw.one(TRAIN_WORDINGS)

    def _told(self, fact: Fact) -> Shown:
        statement = say(STATEMENTS[self._wording(fact)], fact)
        answer = f" {fact.value}."
        return statement.removesuffix(answer), answer

    def _facts(self) -> list[Shown]:
        """Return statements of one to four facts, of one entity or of several."""
        draw, facts = self._draw, self._world.facts
        number = 1 + draw.below(4)
        if draw.chance(0.5):
            chosen = draw.some(self._world.by_entity[draw.one(facts).entity], number)
        else:
            chosen = [draw.one(facts) for _ in range(number)]
        return [self._told(fact) for fact in chosen]

    def _rules(self) -> list[Shown]:
        """Return statements of one to four rules."""
        shown = []
        for _ in range(1 + self._draw.below(4)):
            rule = self._draw.one(self._world.rules)
            statement = say(self._draw.one(RULES), rule)
            shown.append((statement.removesuffix(f" {rule.value}."), f" {rule.value}."))
        return shown

    def _mmlu(self, subject: str) -> Shown:
        fact = self._draw.one(self._world.by_relation[subject_relation(subject)])
        return prompts.mmlu(questions.mmlu(fact, self._wording(fact), subject))

    def _question(self, task: str, *, plain: bool) -> Shown:
        prompt, answer = prompts.PROMPTS[task](self._row(task))
        if not plain and self._draw.chance(_BARE.get(task, 0.0)):
            prompt = prompt.split("\n", 1)[1]
        return prompt, answer

    def _row(self, task: str) -> questions.Row:
        draw, known = self._draw, self._world
        if task == "gsm8k":
            wording = draw.below(len(STATEMENTS))
            return questions.gsm8k(draw.one(self._triples), wording, draw, known)
        pools = {"piqa": known.rules, "hellaswag": known.scripted}
        if task in ("rte", "boolq"):
            fact = draw.one(known.broader(draw.chance(0.5)))
        else:
            fact = draw.one(pools.get(task, known.facts))
        wording = self._wording(fact)
        if task == "boolq":
            return questions.boolq(fact, wording, draw, known)
        if task == "winogrande":
            return questions.winogrande(fact, wording, draw, known)
        simple: Mapping[str, Callable[[Fact, int, Draw], questions.Row]] = {
            "arc": questions.arc,
            "hellaswag": questions.hellaswag,
            "piqa": questions.piqa,
            "rte": questions.rte,
        }
        return simple[task](fact, wording, draw)

    def _queries(self, number: int) -> list[questions.Row]:
        draw = self._draw
        intents = draw.some(tuple(INTENTS), 1 + draw.below(len(INTENTS)))
        rows = []
        for _ in range(number):
            intent = draw.one(intents)
            phrase = draw.below(len(INTENTS[intent]))
            rows.append(questions.banking77(intent, phrase, draw.one(TRAIN_WORDINGS)))
        return rows


def _document(shown: Sequence[Shown], title: str, between: str) -> Document:
    """Return a document of questions in which only the answers have a loss."""
    parts = []
    for prompt, answer in shown:
        if title + prompt:
            parts.append((title + prompt, False))
        parts.append((answer, True))
        title = between
    return Document(tuple(parts))
