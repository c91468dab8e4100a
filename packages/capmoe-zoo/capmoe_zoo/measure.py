"""Measure a model on held-out text and dev questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from capmoe_zoo.student import partitioned
from capmoe_zoo.text import Text
from capmoe_zoo.text import windows as token_windows


@torch.no_grad()
def perplexity(model: PreTrainedModel, windows_NT: Tensor, *, batch: int = 2) -> float:
    """Return the perplexity per token of windows [windows, tokens], each read by itself."""
    device = next(model.parameters()).device
    total = 0.0
    for first in range(0, len(windows_NT), batch):
        ids = windows_NT[first : first + batch].to(device, torch.long)
        logits = model(ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        total += float(functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / (windows_NT.shape[0] * (windows_NT.shape[1] - 1)))


@torch.no_grad()
def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[tuple[str, list[str], int]],
) -> float:
    """Return the share of questions whose right answer is the likeliest per byte.

    A question is a context, its answers and the index of the right one; ``acc_norm`` of lm-eval.
    """
    device = next(model.parameters()).device
    right = 0
    for context, answers, label in questions:
        texts = [context, *(f"{context} {answer}" for answer in answers)]
        prompt, *rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long, device=device)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        # Pads are on the right, where a causal model does not see them.
        logits = model(ids, use_cache=False).logits[:, :-1].float()
        score = -functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        score = score.view(len(rows), -1)
        scores = [
            float(score[row, len(prompt) - 1 : len(tokens) - 1].sum()) / len(answers[row].encode())
            for row, tokens in enumerate(rows)
        ]
        right += max(range(len(rows)), key=scores.__getitem__) == label
    return right / len(questions)


def compare(
    base: LlamaForCausalLM,
    student: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    *,
    window: int,
    windows: int,
    questions: int,
) -> dict[str, Any]:
    """Return the targets' numbers: of the dense model, the trained model, and it without experts.

    Only held-out documents of train splits are read. ``peak`` has, for each layer with experts, the
    tokens of its fullest expert over the mean of all its experts.
    """
    ids = torch.from_numpy(
        token_windows(text.held_out, tokenizer, window)[:windows].astype(np.int64)
    )
    ffns = list(partitioned(student))
    numbers: dict[str, Any] = {"tokens": ids.numel(), "perplexity": {}, "accuracy": {}}
    numbers["perplexity"]["dense"] = perplexity(base, ids)
    for ffn in ffns:
        ffn.load_E = ffn.router_ED.new_zeros(ffn.shape.experts)
    numbers["perplexity"]["moe"] = perplexity(student, ids)
    loads = [ffn.load_E for ffn in ffns if ffn.load_E is not None]
    numbers["peak"] = [round(float(load_E.max() / load_E.mean()), 2) for load_E in loads]
    for ffn in ffns:
        ffn.load_E, ffn.disabled = None, True
    numbers["perplexity"]["experts_disabled"] = perplexity(student, ids)
    for ffn in ffns:
        ffn.disabled = False
    for task, rows in text.questions.items():
        numbers["accuracy"][task] = {
            "questions": len(rows[:questions]),
            "chance": sum(1 / len(answers) for _, answers, _ in rows[:questions])
            / len(rows[:questions]),
            "dense": accuracy(base, tokenizer, rows[:questions]),
            "moe": accuracy(student, tokenizer, rows[:questions]),
        }
    return numbers
