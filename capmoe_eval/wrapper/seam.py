"""Refuse a version of a library whose inner parts are not where the suite takes them from.

No public interface gives these parts. They are checked before anything uses them, so that a version
that moved one is refused in one line, and neither breaks in the middle of a run nor goes unnoticed.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from capmoe_eval.errors import UsageError

Part = tuple[str, str, tuple[str, ...]]
"""Module, name, and parameters that are passed or read by name; ``A().b`` is one of an ``A``."""


@dataclass(frozen=True)
class Library:
    """A library whose inner parts the suite uses."""

    distributions: tuple[str, ...]  # the names that it is installed under, the usual one first
    tested: tuple[str, ...]  # versions that the tests ran with
    parts: tuple[Part, ...] = ()

    @property
    def version(self) -> str:
        """The version that is installed, whatever its distribution is called."""
        for name in self.distributions:
            try:
                return version(name).split("+")[0]
            except PackageNotFoundError:
                continue
        return "unknown"

    def moved(self, what: str) -> UsageError:
        """Return the error for a version of which ``what`` is true."""
        name = self.distributions[0]
        return UsageError(
            f"{name}=={self.version}: {what}, so that a capacity cannot be enforced; install "
            f"{name}=={' or '.join(self.tested)}"
        )

    def check(self) -> None:
        """Refuse a version that has not all of the parts.

        Raises:
            UsageError: The line names the first part that is missing, and the tested versions.
        """
        for module, path, parameters in self.parts:
            try:
                part: Any = importlib.import_module(module)
                for step in path.split("."):
                    part = getattr(part, step.removesuffix("()"))
                    part = part() if step.endswith("()") else part
            except (ModuleNotFoundError, AttributeError) as error:
                absent = error.name if isinstance(error, ModuleNotFoundError) else module
                if not f"{absent}".startswith(f"{module.partition('.')[0]}."):  # a whole package
                    raise
                raise self.moved(f"there is no {module}.{path}") from error
            missing = [p for p in parameters if p not in inspect.signature(part).parameters]
            if missing:
                raise self.moved(f"{path} has no parameter {missing[0]}")


_GENERATE, _MOE = "transformers.generation.utils", "transformers.integrations.moe"
_CONFIG, _EP = "transformers.configuration_utils", "transformers.distributed.expert_parallel"
_LOOP = ("generation_config", "logits_processor", "stopping_criteria")

TRANSFORMERS: Final = Library(
    ("transformers",),
    ("5.23.0", "5.24.0"),
    (
        # `generation` follows the loops and replaces their arguments.
        (_GENERATE, "GenerationMixin.generate", ("self", "inputs")),
        (_GENERATE, "GenerationMixin._sample", _LOOP),
        (_GENERATE, "GenerationMixin._beam_search", _LOOP),
        (_GENERATE, "GenerationMixin._assisted_decoding", _LOOP),
        (_GENERATE, "GenerationMixin._prefill", ("model_kwargs",)),
        (
            "transformers.generation.continuous_batching",
            "ContinuousMixin.init_continuous_batching",
            (),
        ),
        ("transformers.generation.configuration_utils", "GenerationConfig().is_assistant", ()),
        ("transformers.generation.configuration_utils", "GenerationConfig().disable_compile", ()),
        # `plan` asks the caches of a forward, and `parallel` reorders them.
        ("transformers.cache_utils", "Cache.get_seq_length", ()),
        ("transformers.cache_utils", "CacheLayerMixin.reorder_cache", ()),
        # `layers` and `kernel`: through which kernel a layer's experts are dispatched.
        (_MOE, "use_experts_implementation", ("experts_interface",)),
        (_MOE, "ALL_EXPERTS_FUNCTIONS.get_interface", ("experts_implementation", "default")),
        (_MOE, "ALL_EXPERTS_FUNCTIONS.register", ()),
        (_CONFIG, "PreTrainedConfig()._experts_implementation", ()),
        (_CONFIG, "PreTrainedConfig()._experts_implementation_internal", ()),
        # `parallel` and `dispatch`
        (_GENERATE, "_slice_mm_encoder_output", ("output", "rows")),
        ("transformers.modeling_utils", "PreTrainedModel.ep_plan", ()),
        ("transformers.modeling_utils", "PreTrainedModel._expand_parallel_plan", ("plan",)),
        (
            "transformers.distributed.configuration_utils",
            "DistributedConfig",
            ("fsdp_size", "ep_size", "ep_implementation"),
        ),
        (_EP, "EPImplementation", ("experts", "ep_mesh", "tp_mesh")),
        (_EP, "EPImplementation.__call__", ("hidden_states", "top_k_index", "top_k_weights")),
        (_EP, "EPImplementationInterface.register", ()),
        (_EP, "apply_expert_parallelism", ("ep_mesh", "tp_mesh", "plan", "ep_implementation")),
    ),
)
