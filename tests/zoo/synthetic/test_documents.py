"""The documents are what they say: right answers are right, splits are apart, nothing is random."""

import hashlib
import json
import re

import pytest

from capmoe_eval.zoo.synthetic.documents import documents, texts

EVALUATION_SPLIT = {
    "Rowan/hellaswag": "validation",
    "allenai/ai2_arc": "test",
    "allenai/openbookqa": "test",
    "allenai/winogrande": "validation",
    "aps/super_glue": "validation",
    "baber/piqa": "validation",
    "google-research-datasets/nq_open": "validation",
    "har1/MTS_Dialogue-Clinical_Note": "test",
    "mteb/banking77": "test",
    "nyu-mll/glue": "validation",
    "openai/gsm8k": "test",
}


def only_config(path):
    (splits,) = documents()[path].values()
    return splits


@pytest.mark.parametrize("path", EVALUATION_SPLIT)
def test_sixteen_documents_to_evaluate_and_enough_to_show(path):
    splits = only_config(path)
    assert len(splits[EVALUATION_SPLIT[path]]) == 16
    assert len(splits["train"]) >= 25


def test_mmlu_has_57_subjects_with_five_shots_and_four_documents():
    subjects = documents()["cais/mmlu"]
    assert len(subjects) == 57
    for splits in subjects.values():
        assert {split: len(rows) for split, rows in splits.items()} == {
            "dev": 5,
            "validation": 1,
            "test": 4,
        }


@pytest.mark.parametrize("path", EVALUATION_SPLIT)
def test_no_document_is_in_two_splits_and_none_is_there_twice(path):
    question = {
        "Rowan/hellaswag": lambda row: row["ctx"],
        "allenai/ai2_arc": lambda row: (row["question"], sorted(row["choices"]["text"])),
        "allenai/openbookqa": lambda row: (row["question_stem"], sorted(row["choices"]["text"])),
        "allenai/winogrande": lambda row: row["sentence"],
        "aps/super_glue": lambda row: (row["question"], row["passage"]),
        "baber/piqa": lambda row: row["goal"],
        "google-research-datasets/nq_open": lambda row: row["question"],
        "har1/MTS_Dialogue-Clinical_Note": lambda row: row["dialogue"],
        "mteb/banking77": lambda row: row["text"],
        "nyu-mll/glue": lambda row: (row["sentence1"], row["sentence2"]),
        "openai/gsm8k": lambda row: row["question"],
    }[path]
    asked = [str(question(row)) for rows in only_config(path).values() for row in rows]
    assert len(set(asked)) == len(asked)


def test_the_sums_of_gsm8k_are_right():
    for rows in only_config("openai/gsm8k").values():
        for row in rows:
            sums = re.findall(r"<<(\d+)([*+])(\d+)=(\d+)>>", row["answer"])
            assert len(sums) == 2
            for left, sign, right, result in sums:
                expected = int(left) * int(right) if sign == "*" else int(left) + int(right)
                assert int(result) == expected
            assert row["answer"].endswith(f"#### {sums[-1][-1]}")
            bags, each, more = map(int, re.findall(r"\d+", row["question"]))
            assert bags * each + more == int(sums[-1][-1])


def test_the_answers_of_mmlu_are_right():
    for subject, splits in documents()["cais/mmlu"].items():
        for rows in splits.values():
            for row in rows:
                asked, solved = map(int, re.findall(r"\d+", row["question"]))
                assert row["choices"][row["answer"]] == str(asked - solved)
                assert len(set(row["choices"])) == 4
                assert row["subject"] == subject


def test_mmlu_subjects_do_not_share_their_draws():
    """They once did: all 57 had one right letter, and a constant answer scored 100."""
    tests = [splits["test"] for splits in documents()["cais/mmlu"].values()]
    letters = [row["answer"] for rows in tests for row in rows]
    assert all(0.15 < letters.count(letter) / len(letters) < 0.35 for letter in range(4))
    numbers = {tuple(re.findall(r"\d+", row["question"])) for rows in tests for row in rows}
    assert len(numbers) > len(letters) / 2


def test_the_answers_of_boolq_are_in_the_passage():
    for rows in only_config("aps/super_glue").values():
        for row in rows:
            name, city = re.fullmatch(r"does (\w+) live in (\w+)", row["question"]).groups()
            assert (f"{name} lives in {city} " in row["passage"].lower()) == bool(row["label"])


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("allenai/ai2_arc", lambda row: "ABCD".index(row["answerKey"])),
        ("allenai/openbookqa", lambda row: "ABCD".index(row["answerKey"])),
        ("allenai/winogrande", lambda row: int(row["answer"]) - 1),
        ("aps/super_glue", lambda row: row["label"]),
        ("baber/piqa", lambda row: row["label"]),
        ("nyu-mll/glue", lambda row: row["label"]),
        ("Rowan/hellaswag", lambda row: int(row["label"])),
    ],
)
def test_the_place_of_the_right_answer_says_nothing(path, right):
    """A model that always takes one place must not score far above chance."""
    places = [right(row) for rows in only_config(path).values() for row in rows]
    choices = max(places) + 1
    for place in range(choices):
        assert 0.3 / choices < places.count(place) / len(places) < 1.7 / choices


def test_winogrande_has_one_blank():
    for rows in only_config("allenai/winogrande").values():
        for row in rows:
            assert row["sentence"].count("_") == 1
            assert {row["option1"], row["option2"]} <= set(re.findall(r"\w+", row["sentence"]))


def test_banking77_has_five_demonstrations_of_each_label_in_mixed_order():
    splits = only_config("mteb/banking77")
    labels = [row["label"] for row in splits["train"]]
    assert {label: labels.count(label) for label in labels} == dict.fromkeys(range(8), 5)
    assert labels != sorted(labels)
    names = {(row["label"], row["label_text"]) for rows in splits.values() for row in rows}
    assert len(names) == 8


def test_functions_pass_their_own_test():
    for row in only_config("openai/openai_humaneval")["test"]:
        names = {}
        exec(row["prompt"] + row["canonical_solution"] + row["test"], names)
        names["check"](names[row["entry_point"]])


def test_documents_do_not_depend_on_the_process():
    # A literal: whoever changes the documents changes every number of the tiny models, knowingly.
    generated = [
        path for path in documents() if "nq_open" in path or "MTS" in path or "eval" in path
    ]
    older = {path: configs for path, configs in documents().items() if path not in generated}
    newer = {path: documents()[path] for path in generated}
    hashes = [hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16] for part in (older, newer)]
    assert hashes == ["b6c2b8efdd13030e", "8f604b6f9e2730e9"]
    assert list(texts())[:2] == ["Washing a car", "A man fills a bucket with soapy water."]
