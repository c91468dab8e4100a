"""``save_trace=DIR``: write the router's choices of every cell that a run computes as a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import Text
from capmoe_eval.experiment.observation import CellObserver
from capmoe_eval.routing.knobs import Count
from pydantic import Field

if TYPE_CHECKING:
    from capmoe_eval.experiment.configuration import CellPlan
    from capmoe_eval.wrapper.meter import Meter

    from capmoe_serve.recorder import Recorder

_Directory = Annotated[
    Text | Annotated[None, Field(description="null for none")],
    Field(
        description="directory for a trace of each computed cell: the experts of each token; it "
        "changes no result"
    ),
]


@dataclass(frozen=True)
class TraceObserver(CellObserver):
    """Records the routing of the first tokens of a cell."""

    option: ClassVar = "save_trace"
    suffix: ClassVar = ".npz"

    save_trace: _Directory = None
    trace_tokens: Annotated[
        Count, Field(description="most tokens of a trace, up to the end of a forward")
    ] = 100_000

    def observer(self) -> Recorder:
        """Return a recorder."""
        from capmoe_serve.recorder import Recorder

        return Recorder(self.trace_tokens)

    def write(self, plan: CellPlan, meter: Meter, observer: Any) -> None:
        """Write a cell's trace; of several processes the first writes what each recorded.

        Raises:
            UsageError: If no token was routed, or the file cannot be written.
        """
        from capmoe_serve.recorder import trace_fields
        from capmoe_serve.trace import Trace, save_trace

        if not observer.tokens:  # in no process
            raise UsageError(f"{self.setting}: {plan.cell} routed no token")
        if not (parts := meter.ranks.collect(observer.recorded())):
            return
        cut = observer.tokens < observer.seen
        part = f", the first {observer.tokens} of {observer.seen} tokens" if cut else ""
        ep_size = plan.cell.method.ep_size
        trace = Trace(
            n_experts=meter.layers[0].n_experts,
            **trace_fields(parts),
            layers=tuple(layer.name for layer in meter.layers),
            model=plan.cell.model.name,
            source=f"capmoe_eval {plan.cell}{part}",
            ranks=ep_size if ep_size > 1 else None,
        )
        save_trace(trace, self.path(plan))
