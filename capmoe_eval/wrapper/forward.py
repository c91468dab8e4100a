"""Hook a model's forwards: run them one at a time, plan each, and see that every layer ran."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from capmoe_eval.errors import EnforcementError, UsageError
from capmoe_eval.wrapper.call import cached_positions, check_unpacked, read_call
from capmoe_eval.wrapper.generation import Decoding, Generation
from capmoe_eval.wrapper.hook import LayerHook
from capmoe_eval.wrapper.kernel import kept_pairs_kernel
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.plan import ForwardPlan, ForwardStart, ImageFinder, new_columns
from capmoe_eval.wrapper.ranks import ALONE

# Shape suffixes: B sequences, S positions, M columns of a mask over cache and new positions.

CPU = torch.device("cpu")


def remembered(*counters: Any) -> Callable[[], None]:
    """Return a function that gives objects back the counts that they have now.

    Of an attribute that is a dictionary the values may be replaced since then, and lists, also in
    such a dictionary, may have grown. Other attributes may be replaced. So that nothing here takes
    longer with every forward, nothing else may change in place.
    """
    states = [(vars(counter), dict(vars(counter))) for counter in counters]
    lists = []
    dictionaries = []
    for _, attributes in states:
        for value in attributes.values():
            if isinstance(value, dict):
                dictionaries.append((value, dict(value)))
                lists += [(part, len(part)) for part in value.values() if isinstance(part, list)]
            elif isinstance(value, list):
                lists.append((value, len(value)))

    def take_back() -> None:
        for current, before in (*states, *dictionaries):
            dict.clear(current)
            dict.update(current, before)  # a Counter's own adds
        for grown, length in lists:
            del grown[length:]

    return take_back


@contextmanager
def _guarded(model: nn.Module, meter: Meter, hooks: _ForwardHooks) -> Iterator[None]:
    """Run a model's forwards one at a time, under its hooks; restore the model on exit."""
    before = vars(model).get("forward")  # accelerate sets one, too
    guarded_forward: Any = _GuardedForward(model.forward, meter, hooks)
    model.forward = guarded_forward
    try:
        yield
    finally:
        guarded_forward.close()
        if before is None:
            del model.forward
        else:
            model.forward = before
    if guarded_forward.runs:
        raise UsageError(
            "capacity_aware: the block ended while a forward still ran in another thread, whose "
            "last layers had no capacity; wait for the thread inside the block"
        )


class _GuardedForward:
    """The forward of a model under a capacity, also for those who call it as ``model.forward``."""

    def __init__(self, stock: Callable[..., Any], meter: Meter, hooks: _ForwardHooks) -> None:
        functools.update_wrapper(self, stock)
        self._stock, self._meter, self._hooks = stock, meter, hooks
        self._alone = threading.Lock()  # held by the forward that runs
        self._is_closed = False

    @property
    def runs(self) -> bool:
        """True while a forward runs."""
        return self._alone.locked()

    def close(self) -> None:
        """Leave the forwards of those who kept ``model.forward`` to the model."""
        self._is_closed = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._stock, memo)  # the copy's own

    # Where a caller is compiled, the hooks are not: they count on the host.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward: no other beside it, and counted whole or not at all."""
        if self._is_closed:
            return self._stock(*args, **kwargs)
        if not self._alone.acquire(blocking=False):
            raise UsageError(
                "capacity_aware: a forward of the model began while another one ran, inside it or "
                "in another thread; run them one after the other, or load the model twice"
            )
        try:
            if self._meter.is_aside:
                self._leave_kernels_alone()
                return self._stock(*args, **kwargs)
            return self._run(args, kwargs)
        finally:
            self._hooks.no_forward()
            self._alone.release()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        undo = [remembered(*self._meter.observers)]
        try:
            plan = self._hooks.before_forward(args, kwargs)
            undo.append(remembered(*(sums for of in plan.observers for sums in of.sums)))
            output = self._stock(*args, **kwargs)
            self._hooks.after_forward()
        except EnforcementError:  # what a broken invariant counted stays: the proofs tell of it
            raise
        except BaseException:
            for take_back in undo:
                take_back()
            raise
        return output

    def _leave_kernels_alone(self) -> None:
        """Have the stock kernels compute all that the routers choose."""
        for layer in self._meter.layers:
            experts: Any = layer.experts
            if hasattr(experts, "capmoe_untouched"):
                experts.capmoe_untouched = True


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
        stack.enter_context(_guarded(model, meter, hooks))
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
        n_cached = cached_positions(arguments)
        step = self.generation.step()
        decode = not step.first if step else tokens.shape[1] == 1 and n_cached > 0
        prompt_length = tokens.shape[1]  # positions of this forward that are no generated tokens
        if step and step.first:
            step.prompt_length = n_cached + tokens.shape[1]
        elif decode:
            prompt_length = max(0, step.prompt_length - n_cached) if step else 0
        mask, first_column = self._mask(arguments, tokens, step, n_cached)
        if step is None and arguments.get("attention_mask") is None:
            check_unpacked(arguments.get("position_ids"), mask)
        marked = meter.real_tokens_BS
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
            call_mask=arguments.get("attention_mask")
            if marked is None
            else meter.ranks.own(marked),
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
        """Return a forward's mask of real tokens, and its first column of a new token."""
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
        """Return the plan of the forward that runs, and whether it is computed again."""
        if self._plan is not None and self._plan.thread == threading.get_ident():
            self._plan.seen.append((number, part))
            return self._plan, False
        if self._last is not None and self._plan is None:
            return self._last, True
        raise EnforcementError(
            "a router ran outside a forward of the model that is under a capacity: call that "
            "model, not a part of it, or put the part under the capacity that is called"
        )
