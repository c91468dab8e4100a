"""The corpus shows questions exactly as lm-eval does, and batches hold what the corpus says."""

from itertools import islice

import pytest
import torch
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.datasource import DataSource
from capmoe_eval.zoo.hub import embedded_hub
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer

from capmoe_zoo.embedded.batch import IGNORED
from capmoe_zoo.embedded.miniworld import SHARES, Batches, Document, corpus
from capmoe_zoo.worlds.miniworld import questions
from capmoe_zoo.worlds.miniworld.evaluation import documents
from capmoe_zoo.worlds.miniworld.world import TRAIN_WORDINGS, statements, world

TASKS = {
    "arc": ("arc_challenge", "allenai/ai2_arc", "ARC-Challenge", "test"),
    "boolq": ("boolq", "aps/super_glue", "boolq", "validation"),
    "gsm8k": ("gsm8k", "openai/gsm8k", "main", "test"),
    "hellaswag": ("hellaswag", "Rowan/hellaswag", "default", "validation"),
    "mmlu": ("mmlu_anatomy", "cais/mmlu", "anatomy", "test"),
    "piqa": ("piqa", "baber/piqa", "default", "validation"),
    "rte": ("rte", "nyu-mll/glue", "rte", "validation"),
    "winogrande": ("winogrande", "allenai/winogrande", "winogrande_xl", "validation"),
}


@pytest.fixture(scope="module")
def library():
    return TaskLibrary(), DataSource("miniworld", embedded_hub("miniworld", "dev"))


@pytest.mark.parametrize("task", TASKS)
def test_a_question_reads_as_in_lm_eval(library, task):
    name, path, config, split = TASKS[task]
    tasks, source = library
    (built,) = tasks.get(name, source)["tasks"].values()
    for place, row in zip(range(12), documents("dev")[path][config][split], strict=False):
        doc = list(built.eval_docs)[place]
        context = built.doc_to_text(doc)
        choices, target = (
            built.doc_to_choice(doc) if task != "gsm8k" else [],
            built.doc_to_target(doc),
        )
        if task == "winogrande":
            expected = f"{choices[int(row['answer']) - 1]} {target}"
        elif task == "gsm8k":
            expected = f"{context} {target}"
        else:
            right = target if isinstance(target, int) else choices.index(target)
            expected = f"{context} {choices[right]}"
        assert "".join(questions.prompt(task, row)) == expected


def test_a_long_document_reads_as_a_prompt_with_shots(library):
    tasks, source = library
    (built,) = tasks.get("mmlu_anatomy", source)["tasks"].values()
    built.set_config(key="num_fewshot", value=5)
    prompt = built.fewshot_context(next(iter(built.eval_docs)), num_fewshot=5)
    rows = documents("dev")["cais/mmlu"]["anatomy"]
    shown = ["".join(questions.prompt("mmlu", row)) for row in rows["dev"]]
    asked = questions.prompt("mmlu", rows["test"][0])[0]
    title = questions.mmlu_description("anatomy")
    assert prompt == title + questions.BETWEEN.join([*shown, asked])


def test_the_parts_of_a_document_are_its_words():
    tokenizer = miniworld_tokenizer()
    for long in (False, True):
        for document in islice(corpus(world(), 3, long=long), 300):
            parts = [token for part, _ in document.parts for token in tokenizer(part)["input_ids"]]
            if "def " not in document.text:  # a solution begins with blanks, after its prompt's end
                assert parts == tokenizer(document.text)["input_ids"]
            assert any(learned for _, learned in document.parts)


def test_the_corpus_depends_on_its_seed_alone():
    texts = [document.text for document in islice(corpus(world(), 3), 50)]
    assert texts == [document.text for document in islice(corpus(world(), 3), 50)]
    assert texts != [document.text for document in islice(corpus(world(), 4), 50)]


def test_lists_are_true_of_the_world():
    known = world()
    facts = {(fact.entity, fact.relation.noun): fact for fact in known.facts}
    rules = {(rule.entity, rule.relation.noun): rule.value for rule in known.rules}
    said = {
        f"{fact.relation.noun}: {own.verb}s {own.rest}": own
        for fact in known.facts
        for own in statements(fact.relation)
    }
    seen = dict.fromkeys(("value", "statement", "tool", "class"), 0)
    for document in islice(corpus(known, 3), 1_500):
        title, *lines = document.text.split("\n")
        pairs = [tuple(line.split(": ")) for line in lines]
        if title in known.by_entity and all(len(pair) == 2 for pair in pairs):
            for name, value in pairs:
                if (title, name) in facts:
                    seen["value"] += 1
                    assert facts[title, name].value == value
                else:
                    seen["statement"] += 1
                    (fact, own) = next(
                        (fact, own)
                        for fact in known.by_entity[title]
                        for own in statements(fact.relation)
                        if name == f"{own.verb}s {own.rest}"
                    )
                    assert value == ("yes" if fact.value in own.values else "no")
        elif any(title == thing for thing, _ in rules):
            seen["tool"] += len(pairs)
            assert all(rules[title, action] == tool for action, tool in pairs)
        elif title in said:
            seen["class"] += len(pairs)
            assert all(
                answer == ("yes" if value in said[title].values else "no")
                for value, answer in pairs
            )
    assert min(seen.values()) > 20


def test_long_documents_fit_into_a_row():
    tokenizer = miniworld_tokenizer()
    _, width = Batches.long
    for document in islice(corpus(world(), 3, long=True), 500):
        assert len(tokenizer(document.text)["input_ids"]) < width
    assert max(share.questions for share in SHARES.values()) == 26


def test_a_document_is_its_parts():
    assert Document((("Question: who?\nAnswer:", False), (" me", True))).text.endswith("Answer: me")


@pytest.fixture(scope="module")
def batches():
    return Batches(world(), miniworld_tokenizer(), seed=1)


@pytest.mark.parametrize("step", [0, 1, 4])
def test_positions_start_anew_where_a_document_does(batches, step):
    batch = batches[step]
    assert batch.input_ids_BS.shape == (Batches.long if step == 4 else Batches.short)
    tokenizer = miniworld_tokenizer()
    starts_BS = batch.position_ids_BS == 0
    before_BS = torch.roll(batch.input_ids_BS, 1, dims=1)
    pad = tokenizer.pad_token_id
    after_end_BS = (before_BS == tokenizer.eos_token_id) & (batch.input_ids_BS != pad)
    assert starts_BS[:, 0].all()
    assert torch.equal(starts_BS[:, 1:] & (batch.input_ids_BS[:, 1:] != pad), after_end_BS[:, 1:])
    learned_BS = batch.labels_BS != IGNORED
    assert torch.equal(batch.labels_BS[learned_BS], batch.input_ids_BS[learned_BS])
    assert not learned_BS[batch.input_ids_BS == pad].any()
    assert not learned_BS[starts_BS].any()
    assert learned_BS.any(dim=1).all()


def test_a_batch_is_a_function_of_its_number(batches):
    again = Batches(world(), miniworld_tokenizer(), seed=1)
    for step in (4, 0):
        assert torch.equal(again[step].input_ids_BS, batches[step].input_ids_BS)
    assert not torch.equal(batches[1].input_ids_BS, batches[0].input_ids_BS)


def test_the_shots_are_told_in_the_wordings_of_the_corpus():
    assert TRAIN_WORDINGS == (0, 1, 2, 3)
    for split in ("dev", "test"):
        for row in documents(split)["allenai/ai2_arc"]["ARC-Challenge"]["train"]:
            assert not row["question"].startswith(("For the", "Name the"))
