"""Measure a model on held-out text and dev questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Comparison:
    """The targets' numbers, by model: dense, with experts, and with all experts disabled."""

    tokens: int  # of held-out text
    perplexity: dict[str, float]
    questions: dict[str, int]  # by task
    chance: dict[str, float]
    accuracy: dict[str, dict[str, float]]  # by task and model
    # Of each layer with experts: tokens of its fullest expert over the mean of all its experts.
    peak: list[float]

    def table(self) -> str:
        """Return the numbers as a table in Markdown, and a line of the peaks."""
        tasks = list(self.accuracy)
        rows = [
            ["model", f"perplexity ({self.tokens:,} tokens)"],
            ["---", "---:"],
            *([model, f"{value:.1f}"] for model, value in self.perplexity.items()),
            ["chance", "–"],
        ]
        for task in tasks:
            columns = [f"{task} (%, {self.questions[task]} questions)", "---:"]
            columns += [f"{100 * self.accuracy[task][model]:.1f}" for model in self.perplexity]
            for row, cell in zip(rows, [*columns, f"{100 * self.chance[task]:.1f}"], strict=True):
                row.append(cell)
        peaks = ", ".join(f"{peak:.2f}" for peak in self.peak)
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([*lines, "", f"Fullest expert over the mean, by layer: {peaks}"])


def compare(
    base: LlamaForCausalLM,
    student: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    *,
    window: int,
    windows: int,
    questions: int,
) -> Comparison:
    """Measure the dense model, the trained one, and it with all experts disabled.

    Only held-out documents of train splits are read.
    """
    ids = torch.from_numpy(
        token_windows(text.held_out, tokenizer, window)[:windows].astype(np.int64)
    )
    asked = {task: rows[:questions] for task, rows in text.questions.items()}
    ffns = list(partitioned(student))
    perplexities, answered = {}, {}

    def measure(name: str, model: LlamaForCausalLM) -> None:
        perplexities[name] = perplexity(model, ids)
        answered[name] = {task: accuracy(model, tokenizer, rows) for task, rows in asked.items()}

    measure("dense", base)
    for ffn in ffns:
        ffn.load_E = ffn.router_ED.new_zeros(ffn.shape.experts)
    perplexity(student, ids)
    loads = [ffn.load_E for ffn in ffns if ffn.load_E is not None]
    peaks = [float(load_E.max() / load_E.mean()) for load_E in loads]
    for ffn in ffns:
        ffn.load_E = None
    measure("experts", student)
    for ffn in ffns:
        ffn.disabled = True
    measure("experts disabled", student)
    for ffn in ffns:
        ffn.disabled = False
    return Comparison(
        tokens=ids.numel(),
        perplexity=perplexities,
        questions={task: len(rows) for task, rows in asked.items()},
        chance={
            task: sum(1 / len(answers) for _, answers, _ in rows) / len(rows)
            for task, rows in asked.items()
        },
        accuracy={
            task: {name: of_task[task] for name, of_task in answered.items()} for task in asked
        },
        peak=peaks,
    )
