"""Write the trace of a run: the router's choices while a cell was computed."""

from __future__ import annotations

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.preparation import trace_path
from capmoe_eval.experiment.configuration import Plan
from capmoe_eval.serving.trace import Trace
from capmoe_eval.serving.trace_file import save_trace
from capmoe_eval.wrapper.meter import Meter
from capmoe_eval.wrapper.observers.trace import Recorder, merged


def write_trace(plan: Plan, meter: Meter, recorder: Recorder | None) -> None:
    """Write the trace of a cell that was computed under this meter, if one is asked for.

    Processes that share the model call it together; what each has recorded becomes one file.

    Raises:
        UsageError: If no token was routed, or the file cannot be written.
    """
    path = trace_path(plan)
    if path is None or recorder is None:
        return
    if not recorder.tokens:  # in no process
        raise UsageError(f"save_trace={plan.save_trace}: {plan.cell} routed no token")
    cut = recorder.tokens < recorder.seen
    part = f", the first {recorder.tokens} of {recorder.seen} tokens" if cut else ""
    if not (parts := meter.ranks.collect(recorder.recorded())):
        return  # the first process writes
    recorded = merged(parts)
    ep_size = plan.cell.method.ep_size
    trace = Trace(
        n_experts=meter.layers[0].n_experts,
        expert_TLK=recorded.expert_TLK,
        score_TLK=recorded.score_TLK,
        step_T=recorded.step_T,
        decode_S=recorded.decode_S,
        layers=tuple(layer.name for layer in meter.layers),
        model=plan.cell.model.name,
        source=f"capmoe_eval {plan.cell}{part}",
        ranks=ep_size if ep_size > 1 else None,
    )
    save_trace(trace, path)
