"""Generate the training corpus, and its batches: facts, and questions in the prompts of lm-eval.

Most documents are short; a few have as many questions as the prompts of the evaluation, so that the
model has seen 5, 10 or 25 demonstrations. Questions of the evaluation sets never occur:
:mod:`capmoe_zoo.worlds.miniworld.world` says how they are kept out.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from capmoe_eval.evaluation.longicl.protocol import INTRODUCTION
from capmoe_eval.experiment.files import read_data
from capmoe_eval.zoo.sets import Row
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from capmoe_zoo.embedded.batch import Batch, Encoded, Parts, encoded, pack, train_bpe
from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.miniworld import questions
from capmoe_zoo.worlds.miniworld import world as worlds
from capmoe_zoo.worlds.miniworld.evaluation import subject_relation
from capmoe_zoo.worlds.miniworld.questions import PromptAndAnswer, Questions
from capmoe_zoo.worlds.miniworld.world import LEXICON, Fact, MiniWorld

#: How much more often the corpus speaks of the best known entity than of the least known.
FAME = 100.0
#: Upper bound on the number of tokens, the two special ones and the 256 bytes included.
MAX_VOCABULARY = 2560
# Numbers of short and long documents that the tokenizer is trained on, and the lowest frequency of
# a merge; rarer ones belong to no word of the world.
_SHORT, _LONG, _RAREST = 60_000, 2_000, 12


#: How often a kind of documents comes, and its questions; ``miniworld.yaml`` has what they say.
SHARES = read_data(__package__, "miniworld.yaml", dict[str, dict[str, Any]])


def corpus(
    mini_world: MiniWorld, seed: int, *, long: bool = False, late: bool = False
) -> Iterator[Parts]:
    """Yield documents about a world without end, each in pieces that end at the end of a word.

    What cannot be predicted, such as the next question, has no loss.
    They are short, or ``long`` (about 100 to 400 tokens); ``late`` short ones have the shares of
    the second part of a training.
    """
    column = "long" if long else "late" if late else "short"
    weights = {kind: share[column] for kind, share in SHARES.items() if column in share}
    made = Questions(Draw(f"corpus-{mini_world.seed}-{seed}-{long}"), mini_world)
    while True:
        kind = made.draw.one_of(list(weights), list(weights.values()))
        yield _document_of_kind(made, kind, long)


def _document_of_kind(made: Questions, kind: str, long: bool) -> Parts:
    """Return a document of a kind; the questions of a long one are as in the evaluation."""
    draw, share = made.draw, SHARES[kind]
    number = share["questions"] if long else 1 + draw.below(share.get("few", 1))
    titled = long or draw.chance(0.2)
    if kind in _WITHOUT_QUESTIONS:
        return _WITHOUT_QUESTIONS[kind](made)
    title, between = "", questions.BETWEEN
    prompts: list[PromptAndAnswer] = []
    if kind == "banking77":
        title, between = INTRODUCTION, "\n"
        intents = draw.some(tuple(LEXICON["intents"]), 1 + draw.below(len(LEXICON["intents"])))
        for _ in range(number):
            intent = draw.one(intents)
            phrase = draw.below(len(LEXICON["intents"][intent]))
            row = questions.banking77(intent, phrase, draw.one(worlds.TRAIN_WORDINGS))
            prompts.append(questions.prompt(kind, row))
    elif kind == "mmlu":
        subject = draw.one(LEXICON["subjects"])
        title = questions.mmlu_description(subject) if titled else ""
        for _ in range(number):
            fact = _known(made, made.world.by_relation[subject_relation(subject)])
            row = questions.mmlu(fact, _wording(made, fact), subject)
            prompts.append(questions.prompt(kind, row))
    else:
        if kind == "open":
            title, between = questions.OPEN_DESCRIPTION if titled else "", "\n"
        for _ in range(number):
            prompt, answer = questions.prompt(kind, _row(made, kind))
            if not long and draw.chance(share.get("bare", 0.0)):
                prompt = prompt.split("\n", 1)[1]
            prompts.append((prompt, answer))
    return _document(prompts, title, between)


def _known(made: Questions, facts: Sequence[Fact]) -> Fact:
    """Return a random fact, more often one about a well known entity."""
    return made.draw.early(facts, FAME)


def _wording(made: Questions, fact: Fact) -> int:
    """Return a random wording that the corpus may use for the fact."""
    wording = made.draw.below(len(worlds.WORDINGS["statements"]))
    return wording if fact.allows(wording) else made.draw.one(worlds.TRAIN_WORDINGS)


def _facts(made: Questions) -> Parts:
    """Return statements of one to four facts, of one entity or of several."""
    draw, facts = made.draw, made.world.facts
    number = 1 + draw.below(4)
    if draw.chance(0.5):
        chosen = draw.some(made.world.by_entity[_known(made, facts).entity], number)
    else:
        chosen = [_known(made, facts) for _ in range(number)]
    prompts = [_statement("statements", _wording(made, fact), fact) for fact in chosen]
    return _document(prompts, "", " ")


def _rules(made: Questions) -> Parts:
    """Return statements of one to four rules."""
    prompts = []
    for _ in range(1 + made.draw.below(4)):
        rule = _known(made, made.world.rules)
        prompts.append(_statement("rules", made.draw.below(len(worlds.WORDINGS["rules"])), rule))
    return _document(prompts, "", " ")


def _cards(made: Questions) -> Parts:
    """Return facts of one entity in a list, which takes fewer words for each."""
    draw, entity = made.draw, _known(made, made.world.facts).entity
    facts = made.world.by_entity[entity]
    lines = []
    for fact in draw.some(facts, 3 + draw.below(len(facts) - 2)):
        lines.append((fact.relation.noun, fact.value))
        if fact.relation.broader and draw.chance(0.5):
            broader = draw.one(worlds.statements(fact.relation))
            line = (broader.phrase, broader.answer(fact.value))
            lines.insert(draw.below(len(lines) + 1), line)
    return _listed(entity, lines)


def _uses(made: Questions) -> Parts:
    """Return the tools of one thing in a list."""
    thing = _known(made, made.world.rules).entity
    chosen = made.draw.some(made.world.by_thing[thing], 3 + made.draw.below(6))
    return _listed(thing, [(rule.relation.noun, rule.value) for rule in chosen])


def _classes(made: Questions) -> Parts:
    """Return a statement, and some of the values of its relation: does it follow from them?"""
    draw = made.draw
    relation = draw.one([relation for relation in worlds.RELATIONS if relation.broader])
    broader = draw.one(worlds.statements(relation))
    values = draw.some(relation.values, 4 + draw.below(5))
    lines = [(value, broader.answer(value)) for value in values]
    return _listed(f"{relation.noun}: {broader.phrase}", lines)


_WITHOUT_QUESTIONS = {
    "facts": _facts,
    "rules": _rules,
    "cards": _cards,
    "uses": _uses,
    "classes": _classes,
}


def _row(made: Questions, task: str) -> Row:
    """Return the row of a question of a task."""
    draw, mini_world = made.draw, made.world
    if task == "gsm8k":
        wording = draw.below(len(worlds.WORDINGS["problems"]))
        return made.gsm8k(draw.one(questions.number_triples()["train"]), wording)
    if task == "function":
        parts = draw.one(questions.functions()["train"])
        return made.function(parts, draw.one(worlds.TRAIN_WORDINGS))
    if task == "dialogue":
        about = mini_world.by_entity[_known(made, mini_world.facts).entity]
        facts = draw.some(about, 3 + draw.below(2))
        return made.dialogue(facts, draw.one(worlds.TRAIN_WORDINGS))
    pools = {"piqa": mini_world.rules, "hellaswag": mini_world.scripted}
    if task in ("rte", "boolq"):
        fact = _known(made, mini_world.broader[draw.chance(0.5)])
    else:
        fact = _known(made, pools.get(task, mini_world.facts))
    wording = _wording(made, fact)
    if task != "open":
        return made.of(task, fact, wording)
    if draw.chance(0.5):
        return made.attribute(fact, wording)
    if not all(other.allows(wording) for other in made.alike(fact)):
        wording = draw.one(worlds.TRAIN_WORDINGS)
    row = made.search(fact, wording)
    return {**row, "answer": draw.shuffled(row["answer"])}  # any of them first


def _statement(kind: str, wording: int, fact: Fact) -> PromptAndAnswer:
    """Return a statement, cut before the value that it ends in, and the value."""
    answer = f" {fact.value}."
    return worlds.say(kind, wording, fact).removesuffix(answer), answer


def _listed(title: str, lines: Sequence[tuple[str, str]]) -> Parts:
    """Return a list of names and values; the values are the answers."""
    return _document([(f"{name}:", f" {value}") for name, value in lines], f"{title}\n", "\n")


def _document(prompts: Sequence[PromptAndAnswer], title: str, between: str) -> Parts:
    """Return a document of questions in which only the answers have a loss."""
    parts = []
    for prompt, answer in prompts:
        if title + prompt:
            parts.append((title + prompt, False))
        parts.append((answer, True))
        title = between
    return parts


def text_of(document: Parts) -> str:
    """Return the whole text of a document."""
    return "".join(part for part, _ in document)


def corpus_batch(
    world: MiniWorld, tokenizer: PreTrainedTokenizerFast, seed: int, early: int, step: int
) -> Batch:
    """Return the batch of a step; the rows of every fifth begin with a long document.

    The second part of a training begins after ``early`` batches.
    """
    is_long = step % 5 == 4
    n_rows, width = (4, 480) if is_long else (16, 128)

    def documents(long: bool) -> Iterator[Encoded]:
        # Every step has a seed of its own; the factor keeps those of different seeds apart.
        stream = corpus(world, seed * 1_000_003 + step, long=long, late=step >= early)
        return encoded(stream, tokenizer, width)

    openings = documents(long=True)
    rows = [[next(openings)] if is_long else [] for _ in range(n_rows)]
    return pack(rows, documents(long=False), width, int(tokenizer.pad_token_id))


def train_tokenizer(mini_world: MiniWorld) -> Tokenizer:
    """Train a world's tokenizer on its corpus; of ``world()`` it is the shipped one."""
    documents = [
        *islice(corpus(mini_world, seed=0), _SHORT),
        *islice(corpus(mini_world, seed=0, long=True), _LONG),
    ]
    texts = [text_of(document) for document in documents]
    # The corpus says little of what is not well known, but each of its words is a token, too.
    texts += [worlds.say("statements", 0, fact) for fact in mini_world.facts] * _RAREST
    texts += [worlds.say("rules", 0, rule) for rule in mini_world.rules] * _RAREST
    return train_bpe(texts, MAX_VOCABULARY, rarest=_RAREST)
