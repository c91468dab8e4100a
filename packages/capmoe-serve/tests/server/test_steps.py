"""Real engines: phases, chunks, the prefix cache, preempted and aborted requests, stock bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.observers import Observer

from capmoe_serve.server.engine import StepPlan
from capmoe_serve.trace import load_trace
from server.engines import NEEDS_VLLM, Engine, engine, make, prompt_logprobs, prompts

pytestmark = [NEEDS_VLLM, pytest.mark.slow]


class Plans(Observer):
    """Keeps the plans of every step."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def begin(self, plan: Any) -> None:
        self.plans.append(plan)

    def rows(self, *, decode: bool | None = None, under: bool | None = None) -> int:
        """Return the number of rows of a phase, or of those under the method."""
        return sum(
            int((plan.decode_T == decode).sum()) if decode is not None else len(plan.rows_T)
            for plan in self.plans
            if under in (None, plan.constrained)
        )


def watch(started: Engine, method: Method) -> Plans:
    """Put an engine under a method; return the plans of its following steps."""
    started.put_under(method)
    plans = Plans()
    started.runner.capmoe.meter.observe(plans)
    return plans


def answers(outputs: Sequence[Any]) -> tuple[list[float], list[list[int]]]:
    """Return the log-probabilities of prompts, and the generated tokens."""
    return prompt_logprobs(outputs), [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("olmoe")
    make("olmoe").save_pretrained(path)
    return path


TEXTS = prompts(16, 16, 24, 8)
LENGTHS, NEW = (16, 40, 24, 8), 4
TOTAL = sum(LENGTHS) + len(LENGTHS) * (NEW - 1)  # the last token is not computed
TRIED = {
    "baseline": create_method("baseline"),
    "never reached": create_method("score", 1000.0),
    "prompts": create_method("score", 0.5),
    "every step": create_method("score", 0.5, decode="constrained"),
}


Tried = tuple[list[Any], dict[str, Any]]
"""What an engine answered under a method, and its report, with which others are compared."""


def tried(of: Engine) -> Tried:
    """Return the answers to :data:`TEXTS`, and what was counted."""
    return of.generate(TEXTS, 5), of.report()


@pytest.fixture(scope="module")
def outcomes(tiny: Path) -> dict[str, Tried]:
    """What an engine does under each method of :data:`TRIED`."""
    outcomes = {}
    with engine(tiny, create_method("baseline")) as of:
        for name, method in TRIED.items():
            of.put_under(method)
            outcomes[name] = tried(of)
    return outcomes


@pytest.fixture(scope="module")
def chunked(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    """An engine that cuts prompts into steps of 24 tokens and mixes steps, and writes a trace."""
    traces = tmp_path_factory.mktemp("traces")
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "disable_log_stats": False}
    with engine(tiny, create_method("score", 0.5), traces, TOTAL, **limits) as of:
        yield of, traces


# Chunks, metrics and the trace of one engine.

NAMES = (
    *(f"capmoe_{kind}_pairs_total" for kind in ("routed", "kept", "dropped", "added")),
    "capmoe_tokens_total",
)


def metrics() -> dict[str, Counter[str]]:
    """Return the sums of the metrics of this process by phase."""
    from prometheus_client import REGISTRY

    sums: dict[str, Counter[str]] = {name: Counter() for name in NAMES}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name in sums:
                sums[sample.name][sample.labels["phase"]] += sample.value
    return sums


def test_metrics_and_trace_of_an_engine_are_the_meter_s(chunked: tuple[Engine, Path]) -> None:
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    of, traces = chunked
    before, was = metrics(), of.report()["summary"]
    of.generate(prompts(*LENGTHS), tokens=NEW, prompt_logprobs=None)
    report, sums = of.report(), metrics()
    rose = {name: {p: n - before[name][p] for p, n in by.items()} for name, by in sums.items()}
    phases = {"prompt": sum(LENGTHS), "decode": TOTAL - sum(LENGTHS)}
    assert rose["capmoe_tokens_total"] == phases
    for phase, n in phases.items():
        routed, kept, dropped, added = (rose[name][phase] for name in NAMES[:4])
        assert routed == kept + dropped == n * 2 * 3
        assert added == 0
    dropped = report["summary"]["dropped"] - was["dropped"]
    assert rose["capmoe_dropped_pairs_total"] == {"prompt": dropped, "decode": 0}
    assert dropped > 0
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    shown = generate_latest(registry).decode()  # what ``/metrics`` shows
    assert "capmoe_routed_pairs_total{" in shown
    assert "vllm:prompt_tokens_total{" in shown

    (path,) = traces.iterdir()
    trace = load_trace(path)
    assert (trace.n_tokens, trace.model) == (TOTAL, Path(of.llm.model_config.model).name)
    loads = trace.only("prompts").loads().sum(axis=0)
    assert loads.tolist() == [layer["load_before"] for layer in report["layers"]]


def test_chunks_of_a_prompt_are_prompts(chunked: tuple[Engine, Path]) -> None:
    of, _ = chunked
    of.put_under(create_method("baseline"))
    stock = prompt_logprobs(of.generate(prompts(49, 17)))
    plans = watch(of, create_method("score", 0.5))
    outputs = of.generate(prompts(49, 17), 3)
    assert plans.rows(decode=False) == plans.rows(under=True) == 66
    assert plans.rows(decode=True) == 4
    steps = [plan.step for plan in plans.plans if plan.constrained]
    assert len(steps) >= 3
    assert max(step.n_rows for step in steps) <= 24
    # A prompt of 49 tokens ends in a chunk of one row, beside others.
    single = [of for step in steps for of in zip(step.scheduled, step.computed, strict=True)]
    assert any(scheduled == 1 and computed > 0 for scheduled, computed in single)
    assert prompt_logprobs(outputs) != stock
    assert sum(plan.groups.n_tokens for plan in plans.plans if plan.constrained) == 66


# Engines of their own, which end what the ones before need.


def test_tokens_of_the_prefix_cache_do_not_count(tiny: Path) -> None:
    with engine(
        tiny, create_method("score", 1.0), enable_prefix_caching=True, block_size=32
    ) as cached:
        (text,) = prompts(40)
        asked = {"prompt_logprobs": None}  # with them the whole prompt is computed
        cached.generate([text], **asked)
        plans = Plans()
        cached.runner.capmoe.meter.observe(plans)
        before = cached.report()["summary"]["tokens"]
        cached.generate([text + prompts(5, seed=1)[0]], **asked)
        assert before == 40
        step = plans.plans[0].step
        assert step.computed[0] == 32
        assert cached.report()["summary"]["tokens"] - before == 45 - step.computed[0]


def test_a_preempted_request_computes_its_tokens_again(tiny: Path) -> None:
    # Blocks of 32 tokens for 96 do not hold two requests of 64.
    with engine(
        tiny,
        create_method("score", 1.0, decode="constrained"),
        num_gpu_blocks_override=4,
        block_size=32,
        max_model_len=96,
    ) as narrow:
        plans = Plans()
        narrow.runner.capmoe.meter.observe(plans)
        outputs = narrow.generate(prompts(20, 20), 44, prompt_logprobs=None)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [44, 44]
        again = plans.rows() - 2 * (20 + 43)
        assert again > 0  # what the preempted request had computed
        # Its generated tokens are computed again in one step, and are of the decode phase.
        assert plans.rows(decode=False) - 40 == 20
        assert plans.rows(decode=True) - 2 * 43 == again - 20
        summary = narrow.report()["summary"]
        assert summary["tokens"] == plans.rows(under=True) == plans.rows()


def test_a_bound_that_is_never_reached_changes_no_bit(
    outcomes: dict[str, Tried], tiny: Path
) -> None:
    with engine(tiny, None) as stock:
        assert not hasattr(stock.runner, "capmoe")
        expected = answers(stock.generate(TEXTS, 5))
    for name, (outputs, report) in outcomes.items():
        is_free = name in ("baseline", "never reached")
        assert (answers(outputs) == expected) == is_free
        assert (report["summary"]["dropped"] == 0) == is_free
        assert report["summary"]["tokens"] >= 64


def assert_alike(first: Tried, second: Tried) -> None:
    """Compare two engines: the same drops, and log-probabilities but for rounding."""
    loads, tokens, logprobs = [], [], []
    for outputs, report in (first, second):
        summary = {name: report["summary"][name] for name in ("tokens", "dropped")}
        loads.append((summary, [layer["load_after"] for layer in report["layers"]]))
        tokens.append(answers(outputs)[1])
        logprobs.append(torch.tensor(prompt_logprobs(outputs)))
    assert loads[0] == loads[1]
    assert tokens[0] == tokens[1]
    torch.testing.assert_close(*logprobs, rtol=0, atol=1e-5)


def test_a_compiled_engine_decides_in_every_step(outcomes: dict[str, Tried], tiny: Path) -> None:
    with engine(tiny, TRIED["every step"], enforce_eager=False) as compiled:
        outcome = tried(compiled)
    assert outcome[1]["summary"]["tokens"] == 64 + 4 * 4
    assert_alike(outcome, outcomes["every step"])


# What breaks.


def test_two_ranks_of_tensor_parallelism_decide_alike(
    outcomes: dict[str, Tried], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The plugin of the ranks reads the environment; in this process the tests take its place.
    monkeypatch.setattr("vllm.plugins.plugins_loaded", True)
    monkeypatch.setenv("CAPMOE_METHOD", "score")
    monkeypatch.setenv("CAPMOE_GAMMA", "0.5")
    with engine(tiny, TRIED["prompts"], tensor_parallel_size=2) as both:
        outputs, _ = tried(both)
        for report in both.llm.collective_rpc("capmoe_report"):
            assert_alike((outputs, report), outcomes["prompts"])
