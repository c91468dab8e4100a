"""Make a Mixture-of-Experts model of a dense one, and train it until it answers like it.

``python -m capmoe_zoo train`` runs it. Its directory receives ``state.pt``, written whole every few
minutes, and ``log.jsonl``. A killed training continues from the state. SIGTERM and Ctrl-C end it
after the step in progress, and the state is written; a second signal ends it at once. The device is
a GPU where there is one.

1. The neurons of every second FFN are divided, its router and a low-rank update of its down
   projection are fitted in closed form, layer after layer, on the states that the new model has.
2. Routers, low-rank updates and norms are trained together to predict the dense model's next-token
   distributions and hidden states.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.files import whole_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from capmoe_zoo.base import load_base
from capmoe_zoo.partition import (
    Ffn,
    Shape,
    expert_contributions,
    fit_router,
    low_rank_down,
    neuron_order,
    neuron_weights,
    routing_weights,
)
from capmoe_zoo.student import PartitionedFfn, build_student, load_trained, trained_state
from capmoe_zoo.text import read_text, windows


@dataclass(frozen=True)
class Recipe:
    """A partition and its training; the defaults are those of ``smollm2_moe``."""

    shared: int = 384
    experts: int = 48
    width: int = 24
    top_k: int = 12
    step: int = 2  # every ``step``-th layer has experts
    rank: int = 32
    other_rank: int = 8
    window: int = 256  # tokens
    fit_windows: int = 24  # windows of the fit in closed form
    batch: int = 4  # windows of a step
    micro_batch: int = 2  # windows that are computed at once
    rate: float = 0.001
    router_rate: float = 0.0001
    warmup: int = 10  # steps
    cross_entropy: float = 0.25  # weight of the loss on the text itself
    hidden: float = 1.0  # weight of the relative error of hidden states
    ema: float = 0.98  # of the trained weights; the averaged ones are evaluated and shipped
    evaluate_every: int = 20  # steps
    evaluate_windows: int = 24
    seed: int = 0

    @property
    def shape(self) -> Shape:
        """Return the sizes of an FFN with experts."""
        return Shape(self.shared, self.experts, self.width, self.top_k)


@torch.no_grad()
def fit(
    student: LlamaForCausalLM,
    windows_NT: Tensor,
    recipe: Recipe,
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Divide the neurons and fit routers and down projections, layer after layer.

    The target of a layer is what the dense FFN makes of the states that the student has there.
    Tokens with large outputs, such as the first of a window, count less.
    """
    shape = recipe.shape
    states = student.model.embed_tokens(windows_NT.long())
    positions = torch.arange(states.shape[1], device=states.device)[None]
    rotary = student.model.rotary_emb(states, positions)
    for index, layer in enumerate(student.model.layers):
        ffn = layer.mlp if isinstance(layer.mlp, PartitionedFfn) else None
        caught: list[Tensor] = []
        hook = layer.mlp.register_forward_pre_hook(lambda _, args: caught.append(args[0]))  # noqa: B023
        before = states
        states = _layer(layer, before, rotary, recipe.micro_batch)
        hook.remove()
        if ffn is None:
            continue
        x_TD = torch.cat(caught).flatten(0, 1)
        dense = Ffn(ffn.gate_proj.weight_OI, ffn.up_proj.weight_OI, ffn.down_proj.weight_OI)
        act_TF = dense.activations(x_TD)
        y_TD = act_TF @ dense.down_DF.T
        size_T = y_TD.pow(2).sum(1)
        root_T1 = (size_T + size_T.median()).rsqrt()[:, None]
        order_F = neuron_order(dense, act_TF.cpu(), shape, seed=recipe.seed).to(x_TD.device)
        ffn.permute(order_F)
        dense, act_TF = dense.permuted(order_F), act_TF[:, order_F]
        router_ED = fit_router(x_TD, expert_contributions(dense, act_TF, shape))
        ones_T = x_TD.new_ones(len(x_TD))
        trials = []
        for scale in (1.0, 0.5, 0.25):  # flatter logits give the chosen experts more equal weights
            weight_TE = routing_weights(x_TD @ (scale * router_ED).T, shape.top_k)
            masked_TF = act_TF * neuron_weights(weight_TE, shape, ones_T)
            residual_TD = y_TD - masked_TF @ dense.down_DF.T
            error = _relative(residual_TD * root_T1, y_TD * root_T1)
            trials.append((error, scale, masked_TF, residual_TD))
        error, scale, masked_TF, residual_TD = min(trials, key=lambda trial: trial[0])
        ffn.router_ED.copy_(scale * router_ED)
        b_DR, a_RF = low_rank_down(masked_TF * root_T1, residual_TD * root_T1, recipe.rank)
        # A balanced product, so that one rate fits both factors.
        length_R1 = a_RF.norm(dim=1, keepdim=True).clamp_min(1e-8).sqrt()
        ffn.down_proj.a_RI.copy_(a_RF / length_R1)
        ffn.down_proj.b_OR.copy_(b_DR * length_R1.T)
        residual_TD = residual_TD - masked_TF @ (b_DR @ a_RF).T
        load_E = (weight_TE > 0).sum(0).float()
        say(
            {
                "fit": index,
                "scale": scale,
                "error": round(error, 4),
                "error_low_rank": round(_relative(residual_TD * root_T1, y_TD * root_T1), 4),
                "peak": round(float(load_E.max() / load_E.mean()), 3),
            }
        )
        states = _layer(layer, before, rotary, recipe.micro_batch)


def _relative(residual_TD: Tensor, target_TD: Tensor) -> float:
    return float(residual_TD.pow(2).sum() / target_TD.pow(2).sum())


def _layer(
    layer: nn.Module, states_NTD: Tensor, rotary: tuple[Tensor, Tensor], batch: int
) -> Tensor:
    outputs = []
    for first in range(0, len(states_NTD), batch):
        chunk_NTD = states_NTD[first : first + batch]
        outputs.append(layer(chunk_NTD, position_embeddings=rotary, attention_mask=None))
    return torch.cat(outputs)


def distillation_loss(
    student: LlamaForCausalLM, teacher: LlamaForCausalLM, ids_NT: Tensor, recipe: Recipe
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of windows, and its parts as numbers."""
    sparse = range(recipe.step, student.config.num_hidden_layers, recipe.step)
    with torch.no_grad():
        theirs = teacher.model(ids_NT, output_hidden_states=True, use_cache=False)
        log_teacher = (
            teacher.lm_head(theirs.last_hidden_state[:, :-1]).flatten(0, 1).log_softmax(-1)
        )
    ours = student.model(ids_NT, output_hidden_states=True, use_cache=False)
    log_student = student.lm_head(ours.last_hidden_state[:, :-1]).flatten(0, 1).log_softmax(-1)
    divergence = functional.kl_div(log_student, log_teacher, log_target=True, reduction="batchmean")
    text = functional.nll_loss(log_student, ids_NT[:, 1:].flatten())
    hidden = torch.stack(
        [
            (
                (ours.hidden_states[i] - theirs.hidden_states[i]).pow(2).sum(-1)
                / theirs.hidden_states[i].pow(2).sum(-1)
            ).mean()
            for i in sparse
        ]
    ).mean()
    loss = divergence + recipe.cross_entropy * text + recipe.hidden * hidden
    parts = {"kl": divergence, "cross_entropy": text, "hidden": hidden}
    return loss, {name: float(value.detach()) for name, value in parts.items()}


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


def batch_at(windows_NT: np.ndarray, step: int, recipe: Recipe) -> np.ndarray:
    """Return the windows of a step: epochs of all windows, each in an order of its own."""
    numbers = range(step * recipe.batch, (step + 1) * recipe.batch)
    return windows_NT[[order(number, len(windows_NT), recipe) for number in numbers]]


def order(number: int, windows: int, recipe: Recipe) -> int:
    """Return which of some windows is read as the ``number``-th, from 0."""
    epoch, place = divmod(number, windows)
    return int(np.random.default_rng([recipe.seed, epoch]).permutation(windows)[place])


def fit_rows(windows: int, recipe: Recipe) -> np.ndarray:
    """Return the windows of the fit in closed form."""
    return np.linspace(0, windows - 1, recipe.fit_windows).astype(int)


class Training:
    """A training that a directory holds: its model, optimizer, progress and log."""

    def __init__(self, teacher: LlamaForCausalLM, recipe: Recipe, directory: Path) -> None:
        self.recipe, self.directory, self.teacher = recipe, directory, teacher
        directory.mkdir(parents=True, exist_ok=True)
        device = next(teacher.parameters()).device
        self.student = build_student(
            teacher,
            recipe.shape,
            step=recipe.step,
            rank=recipe.rank,
            other_rank=recipe.other_rank,
            seed=recipe.seed,
        ).to(device)
        trained = {n: p for n, p in self.student.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for n, p in trained.items() if "router" not in n], "scale": 1.0},
                {
                    "params": [p for n, p in trained.items() if "router" in n],
                    "scale": recipe.router_rate / recipe.rate,
                },
            ],
            lr=recipe.rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.ema: dict[str, Tensor] = {}

    @property
    def state_file(self) -> Path:
        """Return the file of the state."""
        return self.directory / "state.pt"

    def log(self, entry: dict[str, Any]) -> None:
        """Append a line to the log."""
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **entry})
        print(line, flush=True)
        with (self.directory / "log.jsonl").open("a") as file:
            file.write(line + "\n")

    def save(self) -> None:
        """Write the state."""
        state = {
            "recipe": asdict(self.recipe),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "trained": trained_state(self.student),
            "ema": self.ema,
            "optimizer": self.optimizer.state_dict(),
        }
        with whole_file(self.state_file) as file:
            torch.save(state, file)

    def resume(self) -> bool:
        """Continue from the state if there is one; return whether there is.

        Raises:
            UsageError: The state has another partition.
        """
        if not self.state_file.exists():
            return False
        device = next(self.teacher.parameters()).device
        state = torch.load(self.state_file, map_location=device, weights_only=True)
        for field in fields(Shape):
            if state["recipe"][field.name] != getattr(self.recipe, field.name):
                raise UsageError(
                    f"{self.state_file}: trained with another {field.name}; choose another --work"
                )
        load_trained(self.student, state["trained"])
        self.ema = state["ema"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        return True

    def evaluate(self, held_out_NT: Tensor) -> float:
        """Return the perplexity of the averaged weights on held-out windows."""
        current = {n: v.clone() for n, v in trained_state(self.student).items()}
        if self.ema:
            _copy(self.student, self.ema)
        try:
            return perplexity(self.student, held_out_NT, batch=self.recipe.micro_batch)
        finally:
            _copy(self.student, current)

    def advance(self, ids_NT: Tensor) -> dict[str, float]:
        """Take a step on windows; return the parts of its loss."""
        recipe = self.recipe
        totals: dict[str, float] = {}
        for first in range(0, len(ids_NT), recipe.micro_batch):
            ids = ids_NT[first : first + recipe.micro_batch]
            loss, parts = distillation_loss(self.student, self.teacher, ids, recipe)
            share = len(ids) / len(ids_NT)
            torch.autograd.backward(share * loss)
            for name, value in parts.items():
                totals[name] = totals.get(name, 0.0) + share * value
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        totals["norm"] = float(nn.utils.clip_grad_norm_(parameters, 1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate * group["scale"] * min(1.0, (self.step + 1) / recipe.warmup)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += ids_NT.numel()
        keep = min(recipe.ema, self.step / (10 + self.step))
        for name, current in trained_state(self.student).items():
            if name in self.ema and current.is_floating_point():
                self.ema[name].lerp_(current, 1 - keep)
            else:
                self.ema[name] = current.clone()
        return totals


def _copy(student: LlamaForCausalLM, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, target in trained_state(student).items():
            target.copy_(state[name])


def token_cache(
    data: Path, tokenizer: PreTrainedTokenizerBase, directory: Path, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the windows of training and held-out text; tokenised once."""
    path = directory / f"tokens-{length}.npz"
    if not path.exists():
        text = read_text(data)
        with whole_file(path) as file:
            np.savez(
                file,
                train=windows(text.train, tokenizer, length),
                held_out=windows(text.held_out, tokenizer, length),
            )
    with np.load(path) as arrays:
        return arrays["train"], arrays["held_out"]


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Have SIGTERM and Ctrl-C add their number to a list; the second is a KeyboardInterrupt."""
    noted: list[int] = []

    def note(number: int, _frame: object) -> None:
        if noted:
            raise KeyboardInterrupt(number)
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(
    base: Path, data: Path, work: Path, recipe: Recipe, *, seconds: float, save_every: float
) -> None:
    """Train, or go on with a training.

    Args:
        base: The GGUF file of the dense model.
        data: Root of the evaluation sets.
        work: Directory of the state and the log; the tokens are kept in it, too.
        recipe: What is trained.
        seconds: Time to train, after the fit in closed form.
        save_every: Seconds between two states.

    Raises:
        KeyboardInterrupt: A signal ended it; the state is written.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher, tokenizer = load_base(base)
    teacher.requires_grad_(False).to(device)
    training = Training(teacher, recipe, work)
    train_NT, held_out_NT = token_cache(data, tokenizer, work, recipe.window)
    dev_NT = torch.from_numpy(held_out_NT[: recipe.evaluate_windows].astype(np.int64))
    if not training.resume():
        dense = perplexity(teacher, dev_NT, batch=recipe.micro_batch)
        training.log({"dense_perplexity": dense, "recipe": asdict(recipe)})
        rows = fit_rows(len(train_NT), recipe)
        fit_NT = torch.from_numpy(train_NT[rows].astype(np.int64)).to(device)
        fit(training.student, fit_NT, recipe, training.log)
        training.save()
        training.log({"step": 0, "perplexity": training.evaluate(dev_NT)})
    begin = saved = time.monotonic()
    before = training.seconds
    with signals_noted() as signals:
        while not signals and time.monotonic() - begin < seconds:
            batch = torch.from_numpy(batch_at(train_NT, training.step, recipe).astype(np.int64))
            parts = training.advance(batch.to(device))
            training.seconds = before + time.monotonic() - begin
            entry = {"step": training.step, "tokens": training.tokens, **parts}
            if not signals and training.step % recipe.evaluate_every == 0:
                entry["perplexity"] = training.evaluate(dev_NT)
            training.log({**entry, "seconds": round(training.seconds, 1)})
            if time.monotonic() - saved > save_every:
                training.save()
                saved = time.monotonic()
        training.save()
    if signals:
        raise KeyboardInterrupt(signals[0])
