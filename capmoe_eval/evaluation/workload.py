"""Count the work of cells without computing them: documents, requests, tokens and memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.batches import Document, documents, note_truncated
from capmoe_eval.evaluation.preparation import import_libraries, task_library
from capmoe_eval.experiment.cell import ModelId
from capmoe_eval.experiment.configuration import CellPlan

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from capmoe_eval.evaluation.tasks import TaskLibrary

# What lm-eval's Hugging Face models generate where a task does not say how much.
_MOST_NEW_TOKENS = 256


@dataclass(frozen=True)
class CellWork:
    """The work of one cell."""

    documents: int  # that are evaluated
    requests: int  # of lm-eval: one for each choice of a document, or one to be continued
    # Of all prompts and choices, pads not counted. Choices of a single token that have the same
    # prompt share a sequence, as in lm-eval.
    tokens: int = 0
    new_tokens: int = 0  # that are generated, at most; an answer may end before
    longest: int = 0  # tokens of the longest sequence, with what is generated
    scored: int = 0  # tokens of the longest sequence whose logits are all needed at once
    truncated: int = 0  # documents whose prompts do not fit into the model
    lost: int = 0  # tokens that a prompt loses at most
    max_length: int = 0  # tokens that the model takes


class WorkCounter:
    """Counts the work of plans whose documents are in place.

    A mistake in any of the plans is a UsageError as soon as a count is asked for.
    """

    def __init__(self, plans: Sequence[CellPlan]) -> None:
        self._plans = plans
        # Bytes of a model's weights, or why they are not known.
        self.weights = functools.cache(_weights)
        self._asked: tuple[object, list[Instance]] = None, []  # of one task: they are large
        self._works: dict[object, CellWork] = {}

    @functools.cached_property
    def library(self) -> TaskLibrary:
        """The tasks of the plans."""
        return task_library(self._plans)

    def work(self, plan: CellPlan) -> CellWork:
        """Return the work of a cell; no tokens where its model's tokenizer is not known."""
        cell = plan.cell
        of_task = (
            *(cell.task, plan.source, cell.limit, cell.eval_seed, cell.system_instruction),
            cell.model if cell.apply_chat_template else None,
        )
        key = of_task, cell.model, cell.backend
        if key not in self._works:
            asked = self._requests(plan, of_task)
            if isinstance(self.weights(cell.model), int):
                reader, most = _reader(cell.model), _max_length(cell.model)
                self._works[key] = workload(asked, reader, most, backend=cell.backend)
            else:
                self._works[key] = CellWork(len(set(documents(asked))), len(asked))
        return self._works[key]

    def batch(self, plan: CellPlan, work: CellWork) -> int:
        """Return the bytes that the largest batch of a cell needs beside its model's weights."""
        from capmoe_eval.evaluation.memory import batch_bytes

        return batch_bytes(
            plan.cell.model,
            sequences=min(sequences(plan), work.requests),
            longest=work.longest,
            new=work.new_tokens // work.requests,
            scored=work.scored > 0,
        )

    def _requests(self, plan: CellPlan, of_task: object) -> list[Instance]:
        from capmoe_eval.evaluation.evaluate import requests

        if self._asked[0] != of_task:
            parts, cell = self.library.parts(plan.cell.task, plan.source), plan.cell
            # Only a chat needs the tokenizer, which may not be at hand.
            is_chat = cell.apply_chat_template
            chat = functools.partial(chat_prompt, _reader(cell.model)) if is_chat else None
            self._asked = of_task, requests(parts, cell, cell.limit, chat)
        return self._asked[1]


def _weights(model: ModelId) -> int | str:
    from capmoe_eval.evaluation.memory import weights_bytes

    try:
        _reader(model)
        return weights_bytes(model)
    except UsageError as error:
        return str(error)


@functools.cache
def _reader(model: ModelId) -> Any:
    import_libraries()
    from capmoe_eval.evaluation.loading import reader_of

    return reader_of(model)


def chat_prompt(
    reader: Any, turns: list[dict[str, str]], add_generation_prompt: bool = True
) -> str:
    """Return the prompt that a tokenizer, or processor, makes of a chat, as lm-eval's models do."""
    prompt: str = reader.apply_chat_template(
        turns,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=not add_generation_prompt,
    )
    return prompt


def _max_length(model: ModelId) -> int:
    """Return the tokens that lm-eval takes a model for."""
    from lm_eval.models.utils import resolve_max_length

    from capmoe_eval.evaluation.memory import configuration

    reader = _reader(model)
    tokenizer = getattr(reader, "tokenizer", reader)
    return model.max_length or resolve_max_length(configuration(model), tokenizer)


def sequences(plan: CellPlan) -> int:
    """Return the sequences of a batch; 1 where lm-eval is to find how many fit."""
    size = str(plan.cell.batch_size)
    return int(size) if size.isdecimal() else 1


def workload(
    asked: Sequence[Instance], reader: Any, max_length: int, *, backend: str = "transformers"
) -> CellWork:
    """Return the work of the requests of a cell, of whose prompts no more tokens than fit count.

    An engine computes every token of every request.

    ``reader`` is the model's tokenizer, or its processor of images and text; the model takes
    ``max_length`` tokens.
    """
    tokenizer = getattr(reader, "tokenizer", reader)
    choices = [request for request in asked if request.request_type != "generate_until"]
    questions = [request for request in asked if request.request_type == "generate_until"]
    scored, continued = ([request.args for request in part] for part in (choices, questions))
    # A rolling request has a text alone.
    pairs = [(*arguments, "")[:2] for arguments in scored]
    texts = [text for pair in pairs for text in pair] + [arguments[0] for arguments in continued]
    distinct = list(dict.fromkeys(texts))  # each is tokenized once
    encoded = tokenizer(distinct, add_special_tokens=False)["input_ids"] if distinct else []
    length = dict(zip(distinct, map(len, encoded), strict=True))
    lost: dict[Document, int] = {}
    in_steps = backend != "transformers"
    most = max_length - in_steps  # an engine generates a token, too
    sequences: dict[object, int] = {}
    for number, (request, (context, continuation)) in enumerate(zip(choices, pairs, strict=True)):
        # The last token is predicted, and no input of transformers.
        last = 0 if in_steps else min(1, length[continuation])
        size = length[context] + length[continuation] - last
        if request.request_type == "loglikelihood":  # a rolling one is computed whole, in windows
            note_truncated(lost, documents([request]), [size], most)
            size = min(size, most)
        alone = not in_steps and length[continuation] == 1
        sequences[number if in_steps else context if alone else (context, continuation)] = size
    sizes = list(sequences.values())
    images = [arguments[2]["visual"] if len(arguments) > 2 else [] for arguments in continued]
    first = next((pictures[0] for pictures in images if pictures), None)
    per_image = 0 if first is None else _tokens_of_image(reader, first)
    prompts = [
        length[arguments[0]] + per_image * len(pictures)
        for arguments, pictures in zip(continued, images, strict=True)
    ]
    new = [
        int(settings.get("max_gen_toks", settings.get("max_new_tokens", _MOST_NEW_TOKENS)))
        for _, settings, *_ in continued
    ]
    whole = [sum(both) for both in zip(prompts, new, strict=True)]
    note_truncated(lost, documents(questions), whole, max_length)
    whole = [min(size, max_length) for size in whole]
    return CellWork(
        len(set(documents(asked))),
        len(asked),
        tokens=sum(sizes) + sum(whole) - sum(new),
        new_tokens=sum(new),
        longest=min(max_length, max([*sizes, *whole], default=0)),
        scored=min(max_length, max(sizes, default=0)),
        truncated=len(lost),
        lost=max(lost.values(), default=0),
        max_length=max_length,
    )


def _tokens_of_image(reader: Any, image: Any) -> int:
    """Return the tokens of an image; others are taken to have as many."""
    with_image = reader(images=[image], text=[reader.image_token])["input_ids"][0]
    return len(with_image) - len(reader.tokenizer(reader.image_token)["input_ids"])
