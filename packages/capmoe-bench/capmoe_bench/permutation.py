"""Count the next tokens that change when the sequences of a batch change their order (§4)."""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from capmoe_eval.evaluation.loading import load_lm
from capmoe_eval.evaluation.tasks import TaskLibrary
from capmoe_eval.experiment.composition import composed, load_option
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.session import capacity_aware
from capmoe_eval.zoo.hub import ready
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from capmoe_bench.benchmarks import check_names
from capmoe_bench.rounds import CPU, finish, say
from capmoe_bench.timings import Target

# Shape suffixes: B sequences of a batch, S positions.

GAMMA: Final = 1.0


def run(arguments: argparse.Namespace) -> None:
    """Permute every batch once, count what changes and write ``permutation.json``."""
    for model in arguments.models:
        check_names(model, arguments.tasks)
    rows = [row for model in arguments.models for row in _of_model(model, arguments)]
    targets = [
        Target.of(
            f"{row['model']}, {row['task']}: {row['method']}, {row['ranks']} ranks, "
            f"{'distinct beginnings' if row['is_distinct'] else 'as asked'}",
            f"Share of {row['positions']} positions with another most likely next token where the "
            f"{row['sequences']} sequences of a batch change their order, at γ=1",
            [row["changed"]],
            unit="share",
        )
        for row in rows
    ]
    options = ("models", "tasks", "batch", "limit")
    finish(arguments, CPU, targets, options, permutations=rows)


def _of_model(model: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the share of next tokens that change, for each method and task."""
    ranks = int(load_option("model", model).ep_size)
    words = [f"model={model}", f"tasks=[{','.join(arguments.tasks)}]", "method=baseline"]
    planned = plans(composed([*words, "device=cpu"]))
    lm, library = load_lm(planned[0].cell.model, planned[0].device), TaskLibrary()
    assert isinstance(lm.model, nn.Module)
    methods = [
        create_method("baseline", None),
        create_method("order", GAMMA),
        create_method("score", GAMMA),
        create_method("score", GAMMA, ep_size=ranks),
    ]
    for plan in planned:
        cell, source = plan.cell, ready(plan.source)
        say(f"permutation: {model}, {cell.task.name}")
        (task,) = library.get(cell.task.lm_eval, source, cell.task.dataset)["tasks"].values()
        shots = cell.task.fewshot or 0
        documents = itertools.islice(task.eval_docs, arguments.limit)
        prompts = [lm.tok_encode(task.fewshot_context(doc, num_fewshot=shots)) for doc in documents]
        for method, is_distinct in itertools.product(methods, (True, False)):
            batches = _batches(prompts, arguments.batch, is_distinct)
            counts = [changed(lm.model, method, *batch) for batch in batches]
            moved, positions = map(sum, zip(*counts, strict=True))
            yield {
                "model": model,
                "task": cell.task.name,
                "method": method.name,
                "ranks": method.ep_size,  # with a capacity each
                # Every sequence begins with a token of its own: no equal gate scores.
                "is_distinct": is_distinct,
                "sequences": arguments.batch,
                "positions": positions,
                "changed": moved / positions,
            }


def _batches(
    prompts: Sequence[list[int]], size: int, is_distinct: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and attention mask [B, S] of each whole batch.

    With ``is_distinct`` every sequence of a batch begins with a token of its own, so that no two
    tokens of a batch have the same context, and with it the same gate scores.
    """
    for start in range(0, len(prompts) - size + 1, size):
        rows = [
            torch.tensor([10 + row, *ids] if is_distinct else ids)
            for row, ids in enumerate(prompts[start : start + size])
        ]
        mask = [torch.ones_like(ids) for ids in rows]
        yield pad_sequence(rows, batch_first=True), pad_sequence(mask, batch_first=True)


def changed(
    model: nn.Module, method: Method, token_BS: torch.Tensor, mask_BS: torch.Tensor
) -> tuple[int, int]:
    """Return how many positions have another most likely next token, and how many there are.

    The batch is computed as it is and in one seeded random order; pads do not count.
    """
    order_B = torch.randperm(len(token_BS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), capacity_aware(model, method):
        before_BS, after_BS = (
            model(
                input_ids=token_BS[rows], attention_mask=mask_BS[rows], use_cache=False
            ).logits.argmax(dim=-1)
            for rows in (torch.arange(len(token_BS)), order_B)
        )
    real_BS = mask_BS[order_B].bool()
    moved_BS = (before_BS[order_B] != after_BS) & real_BS
    return int(moved_BS.sum()), int(real_BS.sum())
