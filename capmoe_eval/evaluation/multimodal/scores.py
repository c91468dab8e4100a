"""Score MME, MMBench, SEED-Bench and easy-VQA, with standard errors.

The protocols are those of lmms-eval (``lmms_eval/tasks/``: ``mme/utils.py``,
``mmbench/mmbench_evals.py``, ``seedbench/utils.py``) and of VLMEvalKit (``vlmeval/dataset/``:
``MME_rating`` of ``utils/yorn.py``, ``image_mcq.py``). A document of lm-eval is one question.
``acc`` is its own score, by which two runs can be compared question by question. The other scores
are of several questions: lm-eval collects an :data:`Answer` of each, and its results hold the
score and, as a metric of its own, the standard error.

Answers are read by fixed rules without a judge, of which the paper states none. The rules follow
VLMEvalKit: ``vlmeval/dataset/utils/yorn.py`` for yes or no, and ``can_infer`` of
``vlmeval/utils/matching_util.py`` for options.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from lm_eval.api.metrics import mean_stderr

from capmoe_eval.evaluation.tasks import YamlTask

#: The rotations of a question of MMBench have numbers that are equal modulo this.
ROTATION = 10**6
#: The categories of each part of MME.
MME = {
    "perception": (
        *("existence", "count", "position", "color", "posters"),
        *("celebrity", "scene", "landmark", "artwork", "OCR"),
    ),
    "cognition": (
        *("commonsense_reasoning", "numerical_calculation"),
        *("text_translation", "code_reasoning"),
    ),
}
#: The capabilities of MMBench as the paper abbreviates them (Figure 11), by ``L2-category``.
CAPABILITIES = {
    "coarse_perception": "CP",
    "finegrained_perception (instance-level)": "FP-S",
    "finegrained_perception (cross-instance)": "FP-C",
    "attribute_reasoning": "AR",
    "relation_reasoning": "RR",
    "logic_reasoning": "LR",
}
#: The dimensions of SEED-Bench on pictures (Table 9), by ``question_type_id``.
DIMENSIONS = {
    1: "scene_understanding",
    2: "instance_identity",
    3: "instance_attributes",
    4: "instance_location",
    5: "instances_counting",
    6: "spatial_relation",
    7: "instance_interaction",
    8: "visual_reasoning",
    9: "text_understanding",
}
#: Resamples of the bootstrap, and its seed.
RESAMPLES, SEED = 1000, 0

Answer: TypeAlias = tuple[str, str, float]
"""A scored answer: the category that it counts for, the picture (MME) or question (MMBench) that it
shares with others, and 1.0 if it is right, else 0.0."""


def yes_or_no(answer: str) -> str | None:
    """Return ``yes`` or ``no`` if that is the first word of an answer, else None.

    VLMEvalKit looks for the word anywhere, lmms-eval (``lmms_eval/tasks/mme/utils.py``) in the
    first four characters.
    """
    match = re.match(r"\W*(yes|no)\b", answer.lower())
    return match[1] if match else None


def first_word(answer: str) -> str | None:
    """Return the first word of an answer in small letters, None if it has none."""
    match = re.search(r"\w+", answer.lower())
    return match[0] if match else None


def option(answer: str, options: Mapping[str, str]) -> str | None:
    """Return the letter of the option that an answer chooses, None if that is not clear.

    ``options`` has the text of each option by its letter. An answer chooses an option by its letter
    as a word of its own, else by the option's text. ``A`` is no letter among more than three words,
    where it may be an article.
    """
    words = re.sub(r"[.()\[\],:;!*#{}]", " ", answer).split()
    letters = [letter for letter in options if letter in words]
    if len(letters) == 1 and not (letters == ["A"] and len(words) > 3):
        return letters[0]
    named = [letter for letter, text in options.items() if text.lower() in answer.lower()]
    return named[0] if len(named) == 1 else None


def mme_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """Return the scores of a question of MME: ``acc``, its category's, and its part's."""
    right = float(yes_or_no(results[0]) == doc["answer"].strip().lower())
    category = doc["category"]
    answer = category, doc["question_id"], right
    parts = [part for part, categories in MME.items() if category in categories]
    return {"acc": right} | _with_errors([category, *parts], answer)


def mmbench_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """Return the scores of a rotation of MMBench: ``acc``, ``circular``, and its capability's."""
    right = float(option(results[0], options(doc, "ABCD")) == doc["answer"])
    capability = CAPABILITIES[doc["L2-category"]]
    answer = capability, str(doc["index"] % ROTATION), right
    return {"acc": right} | _with_errors(["circular", capability], answer)


def seedbench_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the scores of a question of SEED-Bench: ``acc``, and its dimension's."""
    choices = {letter: doc[f"choice_{letter.lower()}"] for letter in "ABCD"}
    right = float(option(results[0], choices) == doc["answer"])
    return {"acc": right, DIMENSIONS[doc["question_type_id"]]: right}


def easy_vqa_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the scores of a question of easy-VQA: ``acc``, and its kind's.

    An answer is right if its first word is the data set's.
    """
    right = float(first_word(results[0]) == doc["answer"])
    return {"acc": right, doc["kind"]: right}


def options(doc: Mapping[str, Any], columns: Sequence[str]) -> dict[str, str]:
    """Return the options of a question of MMBench; the hub has ``nan`` for one that is absent."""
    return {letter: doc[letter] for letter in columns if doc[letter] not in (None, "nan")}


class PictureTask(YamlTask):
    """A task about pictures; its metrics are ``acc`` and those of its data set."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        names, score, stderr = _METRICS[config["task"]]
        metrics = [("acc", "mean", True), *((name, score, True) for name in names)]
        if stderr is not None:
            metrics += ((f"{name}_stderr", stderr, False) for name in names)
        keys = ("metric", "aggregation", "higher_is_better")
        listed = [dict(zip(keys, metric, strict=True)) for metric in metrics]
        super().__init__(config={**config, "metric_list": listed})


def _with_errors(metrics: Sequence[str], answer: Answer) -> dict[str, Answer]:
    """Return an answer for each metric and, after them, for its standard error.

    lm-eval knows no standard error of these metrics and notes ``N/A`` under the name that the
    later metric then overwrites.
    """
    return dict.fromkeys([*metrics, *(f"{metric}_stderr" for metric in metrics)], answer)


def mme_score(answers: Sequence[Answer]) -> float:
    """Return the sum of the categories' scores.

    A category's is 100 · (share of right answers) + 100 · (share of pictures without a wrong one),
    at most 200.
    """
    return float(sum(_score(*counts, slice(None)) for counts in _pictures(answers)))


def mme_stderr(answers: Sequence[Answer]) -> float:
    """Return the standard error of :func:`mme_score`, by a bootstrap over each category's pictures.

    The pictures and not the questions are drawn, because the two answers to a picture depend on
    each other. It is seeded.
    """
    random = np.random.RandomState(SEED)
    total_R = np.zeros(RESAMPLES)
    for right_N, asked_N in _pictures(answers):
        drawn_RN = random.randint(0, len(asked_N), (RESAMPLES, len(asked_N)))
        total_R += _score(right_N, asked_N, drawn_RN)
    return float(total_R.std(ddof=1))


def _pictures(answers: Sequence[Answer]) -> list[tuple[Any, Any]]:
    """Return for each category the right answers to its pictures [N], and all answers [N]."""
    categories: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for category, picture, right in answers:
        categories[category][picture].append(right)
    return [
        (np.array([*map(sum, pictures.values())]), np.array([*map(len, pictures.values())]))
        for pictures in categories.values()
    ]


def _score(right_N: Any, asked_N: Any, drawn: Any) -> Any:
    """Return a category's score of all its pictures, or of each row of drawn ones."""
    whole_N = right_N == asked_N
    share = right_N[drawn].sum(-1) / asked_N[drawn].sum(-1)
    return 100 * share + 100 * whole_N[drawn].mean(-1)


def circular_score(answers: Sequence[Answer]) -> float:
    """Return the share of questions with a right answer to every rotation (circular evaluation)."""
    return float(np.mean(_circular(answers)))


def circular_stderr(answers: Sequence[Answer]) -> float:
    """Return the standard error of :func:`circular_score` over questions; nan for only one."""
    questions = _circular(answers)
    return float(mean_stderr(questions)) if len(questions) > 1 else float("nan")


def _circular(answers: Sequence[Answer]) -> list[float]:
    questions: dict[str, float] = {}
    for _, unit, right in answers:
        questions[unit] = min(right, questions.get(unit, 1.0))
    return list(questions.values())


#: The metrics of each task beside ``acc``: their names, their score, and its standard error.
_METRICS: Mapping[str, tuple[Iterable[str], Any, Any]] = {
    "mme": ((*MME["perception"], *MME["cognition"], *MME), mme_score, mme_stderr),
    "mmbench": (("circular", *CAPABILITIES.values()), circular_score, circular_stderr),
    "seedbench": (DIMENSIONS.values(), "mean", None),
    "easy_vqa": (("shape", "color", "yes_no"), "mean", None),
}
