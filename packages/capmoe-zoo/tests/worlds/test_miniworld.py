"""In a world of another seed, too, no evaluated question is in the corpus or among the shots.

Digests hold the shipped world fixed (``test_sets.py``, ``test_digests.py``), but not the prompts of
lm-eval, as which the corpus shows its questions.
"""

from __future__ import annotations

import re
from itertools import islice

import pytest
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.zoo.hub import embedded_hub

from capmoe_zoo.embedded.miniworld import corpus, text_of
from capmoe_zoo.worlds.miniworld import questions
from capmoe_zoo.worlds.miniworld.evaluation import documents
from capmoe_zoo.worlds.miniworld.world import SPLITS, WORLD_SEED, world

SEED = WORLD_SEED + 1
QUESTION = {
    "Rowan/hellaswag": lambda row: f"{row['activity_label']}: {row['ctx_a']}",
    "allenai/ai2_arc": lambda row: row["question"],
    "allenai/openbookqa": lambda row: row["question_stem"],
    "allenai/winogrande": lambda row: row["sentence"].replace("_", row[f"option{row['answer']}"]),
    "aps/super_glue": lambda row: row["question"],
    "baber/piqa": lambda row: row["goal"],
    "cais/mmlu": lambda row: row["question"],
    "google-research-datasets/nq_open": lambda row: f"Q: {row['question']}",
    "har1/MTS_Dialogue-Clinical_Note": lambda row: row["dialogue"].splitlines()[0],
    "mteb/banking77": lambda row: row["text"],
    "nyu-mll/glue": lambda row: row["sentence2"],
    "openai/gsm8k": lambda row: row["question"],
    "openai/openai_humaneval": lambda row: row["prompt"].splitlines()[1],
}


@pytest.fixture(scope="module", name="stated")
def lines_and_sentences():
    """Return every line of a part of the corpus as a question, and every sentence."""
    lines = set()
    for kind, number in (({}, 20_000), ({"late": True}, 20_000), ({"long": True}, 1_000)):
        for document in islice(corpus(world(SEED), 5, **kind), number):
            for line in text_of(document).split("\n"):
                lines.add(line.removeprefix("Question: ").removeprefix("service query: "))
    for form in ("Q: ", "Guest: ", '    """'):
        assert any(line.startswith(form) for line in lines), "what Table 7 asks is not among them"
    asked = {line.removesuffix("?").lower() for line in lines}
    sentences = {sentence for line in lines for sentence in re.split(r"(?<=[.?]) ", line)}
    return asked | {sentence.lower() for sentence in sentences}


@pytest.mark.parametrize("split", SPLITS)
def test_no_question_is_in_the_corpus_or_among_the_shots(split, stated):
    sets = documents(split, SEED)
    assert sets.keys() == QUESTION.keys()
    for path, question_of in QUESTION.items():
        asked, shots = set(), set()
        for splits in sets[path].values():
            asked |= {question_of(row) for row in splits.get("test") or splits["validation"]}
            for name in ("train", "dev"):
                shots |= {question_of(row) for row in splits.get(name, ())}
        assert not asked & shots, path
        read = stated
        if path == "allenai/openbookqa":  # a stem goes on with one more word
            read = {sentence.rpartition(" ")[0] for sentence in stated}
        assert not {question.lower().removesuffix("?") for question in asked} & read, path


NAMES = {"arc": "arc_challenge", "mmlu": "mmlu_anatomy"}


@pytest.mark.parametrize(
    "task", ["arc", "boolq", "gsm8k", "hellaswag", "mmlu", "piqa", "rte", "winogrande"]
)
def test_a_question_reads_as_in_lm_eval(task):
    source = DataSource("miniworld", embedded_hub("miniworld", "dev"))
    (built,) = TaskLibrary().get(NAMES.get(task, task), source)["tasks"].values()
    for doc in islice(built.eval_docs, 12):
        context, target = built.doc_to_text(doc), built.doc_to_target(doc)
        if isinstance(target, int):
            target = built.doc_to_choice(doc)[target]
        if task == "winogrande":  # a choice is the beginning, with one of the options
            context = built.doc_to_choice(doc)[int(doc["answer"]) - 1]
        assert "".join(questions.prompt(task, doc)) == f"{context} {target}"
