"""By how much rounding may move a model's output: a tolerance that is derived, and not tuned.

Two processors, or two kernels, compute one formula with other roundings. In float32 the unit
roundoff is u = 2⁻²⁴. Adding n products a·b rounds n times, each time by at most u·Σ|a||b|: with
signs that are independent of each other the standard deviation of the sum is at most √n·u·Σ|a||b|,
in whatever order it is added (Higham and Mary, "A New Approach to Probabilistic Rounding Error
Analysis", 2019). What such errors do to the output depends on the model's condition, for which
there is no formula. So it is measured: the model runs RUNS times with errors of exactly that size
and of random signs in every product of matrices and in every attention (Monte Carlo arithmetic).
The error of one computation is taken to be below twice the largest change, and two computations
differ by at most twice that.

Each token has a tolerance for its own outputs, since tokens differ in condition by a factor of
thirty. It depends on the processor in its last digits alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

UNIT = torch.finfo(torch.float32).eps / 2
RUNS = 4


def tolerance(compute: Callable[[], Tensor]) -> Tensor:
    """Return by how much two computations of an output may differ, row by row [..., 1].

    ``compute`` multiplies by ``linear`` alone: the experts' implementation must be eager.
    """
    exact = compute()
    most = torch.zeros_like(exact[..., :1])
    for seed in range(RUNS):
        with _Rounding(seed):
            moved = compute()
        most = torch.maximum(most, (moved - exact).abs().amax(dim=-1, keepdim=True))
    return 4 * most


class _Rounding(TorchFunctionMode):
    """Add an error of the size of rounding, of random sign, to every sum of products."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = function(*args, **kwargs)
        if function is nn.functional.linear:
            sizes = (arg.abs() if isinstance(arg, Tensor) else arg for arg in args)
            n_terms, size = args[0].shape[-1], function(*sizes, **kwargs)
        elif function is nn.functional.scaled_dot_product_attention:
            query, key, value = args
            n_terms, size = value.shape[-2], function(query, key, value.abs(), **kwargs)
        else:
            return result
        signs = torch.randint(0, 2, result.shape, generator=self._generator) * 2 - 1
        return result + signs * size * (math.sqrt(n_terms) * UNIT)
