"""Hook a model's forwards: plan each, have its layers routed, and see that every layer ran."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.wrapper.generation import Decoding, Generation
from capmoe_eval.wrapper.guard import guarded
from capmoe_eval.wrapper.hook import LayerHook
from capmoe_eval.wrapper.kernel import kept_pairs_kernel
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.modality import ImageFinder
from capmoe_eval.wrapper.plan import ForwardPlan, ForwardStart, new_columns, read_call
from capmoe_eval.wrapper.ranks import ALONE

# Shape suffixes: B sequences, S positions, M columns of a mask over cache and new positions.

CPU = torch.device("cpu")


@contextmanager
def hooked(model: nn.Module, meter: Meter) -> Iterator[None]:
    """Install hooks and kernels, and remove them on exit, also on an exception."""
    hooks = _ForwardHooks(model, meter)
    with ExitStack() as stack:
        for hook in hooks.layers:
            # Experts that are spread over processes never get a dropped slot: it is not sent.
            if not meter.method.is_stock and hook.layer.ranks is ALONE:
                stack.enter_context(kept_pairs_kernel(hook.layer.experts, hook.note_computed))
        for handle in hooks.install():
            stack.callback(handle.remove)
        stack.enter_context(guarded(model, meter, hooks))
        stack.enter_context(hooks.generation.followed())
        yield


class _ForwardHooks:
    """The hooks of one :func:`hooked` block."""

    def __init__(self, model: nn.Module, meter: Meter) -> None:
        self._model = model
        self._meter = meter
        self._signature = inspect.signature(model.forward)
        self._images = ImageFinder(model)
        self.layers = [
            LayerHook(
                number,
                layer,
                meter.method.of_layer(number),
                None if meter.calibrated is None else meter.calibrated[number],
                self._running,
            )
            for number, layer in enumerate(meter.layers)
        ]
        layers = range(len(meter.layers))
        self._expected = [(layer, part) for layer in layers for part in ("router", "experts")]
        self._plan: ForwardPlan | None = None
        self._last: ForwardPlan | None = None  # the forward that a backward pass may recompute
        # Without a capacity a decode step needs no count of its tokens, unless they are recorded.
        self.generation = Generation(
            model, lambda: meter.method.decode != "unconstrained" or meter.sees_every_forward
        )

    def install(self) -> Iterator[Any]:
        """Register the hooks and yield their handles."""

        def of(module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
            def checked(called: nn.Module, *call: Any) -> Any:
                if called is not module:
                    raise UsageError(
                        f"{type(called).__name__}: is a copy that was made of a model under a "
                        "capacity, and would half stay under it; copy the model outside the block"
                    )
                return None if self._meter.is_aside else hook(called, *call)

            return checked

        for hook in self.layers:
            router, experts = hook.layer.router, hook.layer.experts
            yield router.register_forward_hook(of(router, hook.route))
            yield experts.register_forward_hook(of(experts, hook.emit), with_kwargs=True)

    # The forward of the whole model.

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardPlan:
        """Return the plan of the forward that begins: its counted tokens, images and groups."""
        meter = self._meter
        arguments, tokens = read_call(self._signature, args, kwargs)
        cache = arguments.get("past_key_values")
        n_cached = 0 if cache is None else int(cache.get_seq_length())
        step = self.generation.step()
        decode = not step.first if step else tokens.shape[1] == 1 and n_cached > 0
        prompt_length = tokens.shape[1]  # positions of this forward that are no generated tokens
        if step and step.first:
            step.prompt_length = n_cached + tokens.shape[1]
        elif decode:
            prompt_length = max(0, step.prompt_length - n_cached) if step else 0
        mask, first_column = self._mask(arguments, tokens, step, n_cached)
        start = ForwardStart(
            meter.forwards,
            mask,
            first_column,
            n_sequences=tokens.shape[0],
            n_new=tokens.shape[1],
            n_cached=n_cached,
            is_prompt=step.first if step else None,
            is_idle=meter.ranks.idle,
            config=self._model.config,
            input_ids_BS=arguments.get("input_ids"),
            token_types_BS=arguments.get("mm_token_type_ids"),
            prompt_length=prompt_length,
        )
        plan = self._plan = ForwardPlan(
            meter.method,
            meter.forwards,
            counted_BS=self._counted(mask, tokens, first_column),
            decode=decode,
            image_BS=self._images.find(
                arguments, tokens, meter.method.modality_setting, prompt_length=prompt_length
            ),
            row_end_BS=self._images.row_ends(arguments),
            ranks=meter.ranks,
            start=start,
        )
        meter.begin(plan)
        return plan

    def _mask(
        self, arguments: dict[str, Any], tokens: Tensor, step: Decoding | None, n_cached: int
    ) -> tuple[Any, int]:
        """Return a forward's mask of real tokens, and its first column of a new token.

        The mask is None if all tokens are real.
        """
        ranks, real_BS = self._meter.ranks, self._meter.real_tokens_BS
        if real_BS is not None:
            real_BS = ranks.own(real_BS)
            if real_BS.shape != tokens.shape[:2]:
                raise UsageError(
                    f"real_tokens: the mask's shape {tuple(real_BS.shape)} is not that of the "
                    f"batch, {tuple(tokens.shape[:2])}"
                )
            return real_BS, 0
        mask = arguments.get("attention_mask")
        if step and getattr(mask, "ndim", None) != 2:
            mask = None if step.mask is None else ranks.own(step.mask)
        if step and step.finished_B is not None:  # sequences that have finished are pads
            if mask is None:
                mask = torch.ones(len(tokens), n_cached + tokens.shape[1], device=tokens.device)
            finished_B1 = ranks.own(step.finished_B)[:, None]
            mask = mask.masked_fill(finished_B1.to(mask.device), 0)
        return mask, n_cached

    def _counted(self, mask: Any, tokens: Tensor, first_column: int) -> Tensor:
        """Return a mask [B, S] of the tokens that count."""
        # One process makes its groups on the host.
        device = CPU if self._meter.ranks is ALONE else tokens.device
        everyone_BS = torch.ones(tokens.shape[:2], dtype=torch.bool, device=device)
        if self._meter.ranks.idle:
            return ~everyone_BS
        if self._meter.method.count_padding or mask is None:
            return everyone_BS
        return new_columns(mask, tokens, first_column).to(tokens.device)

    def after_forward(self) -> None:
        """Check that every layer ran once in the forward that ends, and every invariant."""
        plan = self._plan
        assert plan is not None
        if plan.seen != self._expected:
            names = [layer.name for layer in self._meter.layers]
            missing = [names[n] for n, part in self._expected if (n, part) not in plan.seen]
            raise EnforcementError(
                f"not every MoE layer ran exactly once in a forward: {missing or 'some ran twice'}"
            )
        self._meter.end(plan)
        checkpointed = self._model.training and any(
            getattr(module, "gradient_checkpointing", False) for module in self._model.modules()
        )
        self._last = plan if checkpointed else None

    def no_forward(self) -> None:
        """Note that no forward runs any more."""
        self._plan = None

    def _running(self, number: int, part: str) -> tuple[ForwardPlan, bool]:
        """Return the plan of the forward that runs, and whether it is computed again.

        A backward pass computes the last forward again, with gradient checkpointing.

        Raises:
            EnforcementError: If none runs.
        """
        if self._plan is not None and self._plan.thread == threading.get_ident():
            self._plan.seen.append((number, part))
            return self._plan, False
        if self._last is not None and self._plan is None:
            return self._last, True
        raise EnforcementError(
            "a router ran outside a forward of the model that is under a capacity: call that "
            "model, not a part of it, or put the part under the capacity that is called"
        )
