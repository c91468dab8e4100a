"""Count the work of a cell without computing it: documents, requests and tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from capmoe_eval.evaluation.evaluate import requests
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.datasource import DataSource

# What lm-eval's Hugging Face models generate where a task does not say how much.
_MOST_NEW_TOKENS = 256


@dataclass(frozen=True)
class Workload:
    """The work of one cell."""

    documents: int  # that are evaluated
    requests: int  # of lm-eval: one for each choice of a document, or one to be continued
    # Of all prompts and choices, pads not counted. Choices of a single token that have the same
    # prompt share a sequence, as in lm-eval.
    tokens: int = 0
    new_tokens: int = 0  # that are generated, at most; an answer may end before
    longest: int = 0  # tokens of the longest sequence, with what is generated
    scored: int = 0  # tokens of the longest sequence whose logits are all needed at once


def workload(cell: Cell, library: TaskLibrary, source: DataSource, reader: Any) -> Workload:
    """Return the work of a cell whose documents are in place.

    ``reader`` is the model's tokenizer, or its processor of images and text; with None no tokens
    are counted.

    Raises:
        UsageError: For a task or dataset that is not there.
    """
    tasks = library.get(cell.task.lm_eval, source, cell.task.dataset)
    asked = requests(tasks, cell, cell.limit)
    documents = len({(request.task_name, request.doc_id) for request in asked})
    if reader is None:
        return Workload(documents, len(asked))
    lengths = _Lengths(reader)
    sizes = lengths.of_scored(one.args for one in asked if one.request_type != "generate_until")
    generated = [one.args for one in asked if one.request_type == "generate_until"]
    prompts = lengths.of_prompts(generated)
    new = [
        int(own.get("max_gen_toks", own.get("max_new_tokens", _MOST_NEW_TOKENS)))
        for _, own, *_ in generated
    ]
    whole = [prompt + most for prompt, most in zip(prompts, new, strict=True)]
    return Workload(
        documents,
        len(asked),
        sum(sizes) + sum(prompts),
        sum(new),
        max([*sizes, *whole], default=0),
        max(sizes, default=0),
    )


class _Lengths:
    """Counts tokens; a text is tokenized once, and all together."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._tokenizer = getattr(reader, "tokenizer", reader)

    def of_scored(self, requests: Iterable[tuple[Any, ...]]) -> list[int]:
        """Return the tokens of each sequence of requests for log-likelihoods."""
        pairs = [(*arguments, "")[:2] for arguments in requests]  # a rolling one has a text alone
        size = self._of(text for pair in pairs for text in pair)
        sequences: dict[object, int] = {}
        for context, continuation in pairs:
            single = size[continuation] == 1
            key = context if single else (context, continuation)
            # The last token is predicted, and no input.
            sequences[key] = size[context] + max(0, size[continuation] - 1)
        return list(sequences.values())

    def of_prompts(self, requests: list[tuple[Any, ...]]) -> list[int]:
        """Return the tokens of each prompt that is continued, those of its images included."""
        size = self._of(arguments[0] for arguments in requests)
        images = [arguments[2]["visual"] if len(arguments) > 2 else [] for arguments in requests]
        first = next((own[0] for own in images if own), None)
        each = 0 if first is None else self._of_image(first)
        return [
            size[arguments[0]] + each * len(own)
            for arguments, own in zip(requests, images, strict=True)
        ]

    def _of(self, texts: Iterable[str]) -> dict[str, int]:
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return {}
        encoded = self._tokenizer(distinct, add_special_tokens=False)["input_ids"]
        return dict(zip(distinct, map(len, encoded), strict=True))

    def _of_image(self, image: Any) -> int:
        """Return the tokens of an image; others are taken to have as many."""
        text = self._reader.image_token
        with_image = self._reader(images=[image], text=[text])["input_ids"][0]
        return len(with_image) - len(self._tokenizer(text)["input_ids"])
