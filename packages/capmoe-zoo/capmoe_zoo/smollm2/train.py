"""Make a Mixture-of-Experts model of a dense one, and train it until it answers like it.

``python -m capmoe_zoo train`` runs it, on a GPU where there is one. The same command continues a
killed training from the files of its directory.

1. The neurons of every second FFN are divided, its router and a low-rank update of its down
   projection are fitted in closed form, layer after layer, on the states that the new model has.
2. Routers, low-rank updates and norms are trained together to predict the dense model's next-token
   distributions and hidden states.
"""

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from capmoe_eval.experiment.files import write_bytes
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from transformers import LlamaForCausalLM, PreTrainedModel

from capmoe_zoo.smollm2 import partition
from capmoe_zoo.smollm2.artefact import load_base
from capmoe_zoo.smollm2.partition import PartitionedFfn, Recipe
from capmoe_zoo.smollm2.text import fit_rows, order, read_text, windows
from capmoe_zoo.training import take_steps

_HELD_OUT = 24  # windows of held-out text on which perplexity is measured
_EVERY = 10  # steps between two states, and between two lines of the log


@torch.no_grad()
def fit(
    student: LlamaForCausalLM,
    windows_NT: Tensor,
    recipe: Recipe,
    say: Callable[[str], None] = print,
) -> None:
    """Divide the neurons and fit routers and down projections, layer after layer.

    The target of a layer is what the dense FFN makes of the states that the student has there.
    Tokens with large outputs, such as the first of a window, count less.
    """
    states = student.model.embed_tokens(windows_NT)
    positions = torch.arange(states.shape[1], device=states.device)[None]
    rotary = student.model.rotary_emb(states, positions)
    for index, layer in enumerate(student.model.layers):
        ffn = layer.mlp if isinstance(layer.mlp, PartitionedFfn) else None
        caught: list[Tensor] = []
        hook = layer.mlp.register_forward_pre_hook(lambda _, args: caught.append(args[0]))  # noqa: B023
        before = states
        states = _layer(layer, before, rotary, recipe.batch)
        hook.remove()
        if ffn is None:
            continue
        x_TD = torch.cat(caught).flatten(0, 1)
        act_TF = functional.silu(x_TD @ ffn.gate_proj.weight_OI.T)
        act_TF = act_TF * (x_TD @ ffn.up_proj.weight_OI.T)
        down_DF = ffn.down_proj.weight_OI
        y_TD = act_TF @ down_DF.T
        size_T = y_TD.pow(2).sum(1)
        root_T1 = (size_T + size_T.median()).rsqrt()[:, None]
        order_F = partition.neuron_order(down_DF.cpu(), act_TF.cpu(), recipe).to(x_TD.device)
        ffn.permute(order_F)
        down_DF, act_TF = down_DF[:, order_F], act_TF[:, order_F]
        router_ED = partition.fit_router(
            x_TD, partition.expert_contributions(down_DF, act_TF, recipe)
        )
        ones_T = x_TD.new_ones(len(x_TD))
        trials = []
        for scale in (1.0, 0.5, 0.25):  # flatter logits give the chosen experts more equal weights
            weight_TE = partition.routing_weights(x_TD @ (scale * router_ED).T, recipe.top_k)
            masked_TF = act_TF * partition.neuron_weights(weight_TE, recipe, ones_T)
            residual_TD = y_TD - masked_TF @ down_DF.T
            error = _relative(residual_TD * root_T1, y_TD * root_T1)
            trials.append((error, scale, masked_TF, residual_TD))
        error, scale, masked_TF, residual_TD = min(trials, key=lambda trial: trial[0])
        ffn.router_ED.copy_(scale * router_ED)
        b_DR, a_RF = partition.low_rank_down(
            masked_TF * root_T1, residual_TD * root_T1, recipe.rank
        )
        # A balanced product, so that one rate fits both factors.
        length_R1 = a_RF.norm(dim=1, keepdim=True).clamp_min(1e-8).sqrt()
        ffn.down_proj.a_RI.copy_(a_RF / length_R1)
        ffn.down_proj.b_OR.copy_(b_DR * length_R1.T)
        residual_TD = residual_TD - masked_TF @ (b_DR @ a_RF).T
        rest = _relative(residual_TD * root_T1, y_TD * root_T1)
        say(f"layer {index}: error {error:.4f}, {rest:.4f} with its update")
        states = _layer(layer, before, rotary, recipe.batch)


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
) -> Tensor:
    """Return the loss of windows: of the teacher's predictions and states, and of the text."""
    with torch.no_grad():
        theirs = teacher.model(ids_NT, output_hidden_states=True, use_cache=False)
        log_teacher = teacher.lm_head(theirs.last_hidden_state[:, :-1]).flatten(0, 1)
        log_teacher = log_teacher.log_softmax(-1)
    ours = student.model(ids_NT, output_hidden_states=True, use_cache=False)
    log_student = student.lm_head(ours.last_hidden_state[:, :-1]).flatten(0, 1).log_softmax(-1)
    divergence = functional.kl_div(log_student, log_teacher, log_target=True, reduction="batchmean")
    text = functional.nll_loss(log_student, ids_NT[:, 1:].flatten())
    pairs = list(zip(ours.hidden_states, theirs.hidden_states, strict=True))
    # Behind every layer with experts but the last.
    errors = [
        ((own - target).pow(2).sum(-1) / target.pow(2).sum(-1)).mean()
        for own, target in pairs[recipe.step : -1 : recipe.step]
    ]
    hidden = torch.stack(errors).mean()
    return divergence + recipe.cross_entropy * text + recipe.hidden * hidden


@torch.no_grad()
def perplexity(model: PreTrainedModel, windows_NT: Tensor, *, batch: int = 2) -> float:
    """Return the perplexity per token of windows [windows, tokens], each read by itself."""
    losses = []
    for ids_NT in torch.split(windows_NT, batch):
        logits = model(ids_NT, use_cache=False).logits[:, :-1].flatten(0, 1)
        losses.append(functional.cross_entropy(logits, ids_NT[:, 1:].flatten(), reduction="none"))
    return float(torch.cat(losses).double().mean().exp())


def train(base: Path, data: Path, work: Path, recipe: Recipe, *, steps: int) -> LlamaForCausalLM:
    """Train, or go on with a training, and return the model with its averaged weights.

    Args:
        base: The GGUF file of the dense model.
        data: Root of the evaluation sets.
        work: Directory of the tokens, the fit and the state, from which a killed training goes on,
            and of ``log.txt``, with loss and perplexity on held-out passages.
        recipe: What is trained.
        steps: Steps after the fit in closed form.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher, tokenizer = load_base(base)
    teacher.requires_grad_(False).to(device)
    student = partition.build_student(teacher, recipe).to(device)
    work.mkdir(parents=True, exist_ok=True)

    def tokenised() -> dict[str, Tensor]:
        texts = zip(("train", "held_out"), read_text(data), strict=True)
        return {name: windows(text, tokenizer, recipe.window) for name, text in texts}

    tokens = _kept(work / f"tokens-{recipe.window}.safetensors", tokenised)
    windows_NT, held_out_NT = tokens["train"].to(device), tokens["held_out"][:_HELD_OUT].to(device)

    def say(line: str) -> None:
        with (work / "log.txt").open("a", encoding="utf-8") as file:
            for stream in (file, sys.stdout):
                print(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), line, file=stream)

    def fitted() -> dict[str, Tensor]:
        say(f"perplexity of the dense model {perplexity(teacher, held_out_NT):.2f}")
        fresh = partition.build_student(teacher, recipe).to(device)
        fit(fresh, windows_NT[fit_rows(len(windows_NT), recipe)], recipe, say)
        say(f"perplexity of the fit {perplexity(fresh, held_out_NT):.2f}")
        return partition.trained_state(fresh)

    partition.load_trained(student, _kept(work / "fit.safetensors", fitted))
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    weights = nn.ParameterList(trained.values())
    average = AveragedModel(weights, avg_fn=lambda mean, now, _: mean.lerp(now, 1 - recipe.ema))
    routers = [p for name, p in trained.items() if "router" in name]
    others = [p for name, p in trained.items() if "router" not in name]
    slow: dict[str, Any] = {"params": routers, "share": recipe.router_rate / recipe.rate}
    groups = [{"params": others}, slow]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(weights))

    def say_with_perplexity(line: str) -> None:
        current = [weight.detach().clone() for weight in weights]
        _assign(weights, average.parameters())
        say(f"{line}  perplexity {perplexity(student, held_out_NT):.2f}")
        _assign(weights, current)

    def loss_of(step: int) -> Tensor:
        numbers = range(step * recipe.batch, (step + 1) * recipe.batch)
        rows = [order(number, len(windows_NT), recipe) for number in numbers]
        return distillation_loss(student, teacher, windows_NT[rows], recipe)

    take_steps(
        nn.ModuleList([weights, average]),
        optimizer,
        loss_of,
        steps,
        rate_at=lambda step: recipe.rate * min(1.0, (step + 1) / recipe.warmup),
        checkpoint=work / "state.pt",
        every=_EVERY,
        say=say_with_perplexity,
    )
    _assign(weights, average.parameters())
    return student


@torch.no_grad()
def _assign(weights: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def _kept(file: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of a file, which is made if it is not there."""
    if not file.exists():
        write_bytes(file, save(make()))
    return load_file(file)
