"""What Prometheus sees of a server: counters by layer and phase, loads, and the dashboard."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from capmoe_eval import __version__
from capmoe_eval.errors import UsageError
from capmoe_eval.routing.registry import create_method
from hypothesis import given, settings
from hypothesis import strategies as st

import capmoe_serve.server
from capmoe_serve.server.engine import EngineCapacity
from capmoe_serve.server.metrics import FAMILIES, PHASES, Metrics, layer_labels, share_metrics
from capmoe_serve.server.step import StepRows
from server.engines import NEEDS_VLLM, Engine, engine, make, prompts
from server.stand_ins import HIDDEN, CPUUnquantizedExperts, Layer, Model, Router, runner_of
from server.test_layers import METHODS, steps, under_method

E, K = 7, 3
PAIRS = ("routed", "kept", "dropped", "added")
MIXED = StepRows(("a", "b", "c"), (9, 1, 4), (0, 12, 3), (9, 8, 7))
"""A prompt, a token that was generated, and the last chunk of a prompt."""


@pytest.fixture(autouse=True)
def values_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep values in memory, where registries of tests do not share them."""
    from prometheus_client import values

    monkeypatch.setattr(values, "ValueClass", values.MutexValue)


class Observed:
    """Two layers under a method, with metrics of their own."""

    def __init__(self, name: str, gamma: float, **knobs: Any) -> None:
        from prometheus_client import CollectorRegistry

        self.registry = CollectorRegistry()
        self.method = create_method(name, gamma, **knobs)
        self.layers = [Layer(Router(E, K), CPUUnquantizedExperts(E)) for _ in range(2)]
        model = Model(*self.layers)
        self.capacity = EngineCapacity(model, model.config, self.method)
        meter = self.capacity.meter
        meter.observe(Metrics(meter.layers, self.method, self.registry))
        self._generator = torch.Generator().manual_seed(0)

    def compute(self, rows: StepRows, *, layers: int = 2) -> list[list[set[int]]]:
        """Compute a step; return each layer's experts of every row, by the kernel's call."""
        self.capacity.begin(*runner_of(rows))
        pairs, self.chosen = [], []
        for layer in self.layers[:layers]:
            hidden_NH = torch.randn(rows.n_rows, HIDDEN, generator=self._generator)
            logits_NE = torch.randn(rows.n_rows, E, generator=self._generator)
            logits_NE[:, 0] += 2
            _, weight_NS, index_NS = layer(hidden_NH, logits_NE)
            called = zip(index_NS.tolist(), weight_NS.tolist(), strict=True)
            pairs.append([{e for e, w in zip(*row, strict=True) if w} for row in called])
            self.chosen.append([set(row) for row in logits_NE.topk(K).indices.tolist()])
        if layers < 2:
            self.capacity.abandon()
        else:
            self.capacity.end()
        return pairs

    def __getitem__(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the samples of a metric by the values of its labels, without zeros."""
        return {
            tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == name and sample.value
        }


@given(
    rows=st.lists(steps(), min_size=1, max_size=2),
    chosen=st.sampled_from(METHODS),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    decode=st.sampled_from(["unconstrained", "constrained", "only"]),
)
@settings(max_examples=60, deadline=None)
def test_every_pair_is_counted_once_by_layer_and_phase(
    rows: list[StepRows], chosen: tuple[str, dict[str, Any]], gamma: float, decode: str
) -> None:
    name, knobs = chosen
    observed = Observed(name, gamma, decode=decode, **knobs)
    expected: dict[str, Counter[tuple[str, ...]]] = {kind: Counter() for kind in PAIRS}
    tokens: Counter[tuple[str]] = Counter()
    n_steps: Counter[tuple[str]] = Counter()
    for step in rows:
        pairs = observed.compute(step)
        phases = [PHASES[is_decode] for is_decode in step.decode_N.tolist()]
        tokens.update((phase,) for phase in phases)
        n_steps.update((phase,) for phase in set(phases))
        for layer in range(2):
            chosen_rows = observed.chosen[layer]
            for phase, routed, kept in zip(phases, chosen_rows, pairs[layer], strict=True):
                key = str(layer), phase
                expected["routed"][key] += K
                expected["kept"][key] += len(routed & kept)
                expected["dropped"][key] += len(routed - kept)
                expected["added"][key] += len(kept - routed)
    for kind in PAIRS:
        counted = observed[f"capmoe_{kind}_pairs_total"]
        assert counted == {key: n for key, n in expected[kind].items() if n}
    assert observed["capmoe_tokens_total"] == tokens
    assert observed["capmoe_steps_total"] == n_steps
    summary = observed.capacity.report()["summary"]
    assert sum(observed["capmoe_dropped_pairs_total"].values()) == summary["dropped"]
    assert sum(observed["capmoe_added_pairs_total"].values()) == summary["added"]


@pytest.mark.parametrize("knobs", [{}, {"granularity": "device"}, {"decode": "constrained"}])
def test_loads_and_the_effective_gamma_are_those_of_the_meter(knobs: dict[str, Any]) -> None:
    observed = Observed("score", 0.5, **knobs)
    pairs = [observed.compute(MIXED) for _ in range(3)]
    report = observed.capacity.report()
    number = observed["capmoe_peak_load_ratio_count"]
    total = observed["capmoe_peak_load_ratio_sum"]
    for place, layer in enumerate(report["layers"]):
        for when in ("before", "after"):
            key = str(place), when
            peak = layer["peak"][f"expert_{when}"]
            assert number[key] == 3
            assert total[key] / 3 == pytest.approx(peak["mean"], abs=1e-6)
        under = under_method(observed.method, MIXED)
        loads = {
            when: Counter(
                expert
                for row, is_under in zip(rows[place], under, strict=True)
                if is_under
                for expert in row
            )
            for when, rows in (("before", observed.chosen), ("after", pairs[-1]))
        }
        for when, load in loads.items():
            assert observed["capmoe_fullest_expert_tokens"][str(place), when] == max(load.values())
        effective = observed["capmoe_effective_gamma"][(str(place),)]
        assert effective == pytest.approx(layer["effective_gamma"])


def test_a_step_that_is_broken_off_is_not_counted() -> None:
    observed = Observed("score", 0.5, decode="constrained")
    observed.compute(MIXED, layers=1)
    for kind in PAIRS:
        assert not observed[f"capmoe_{kind}_pairs_total"]
    observed.compute(MIXED)
    assert sum(observed["capmoe_routed_pairs_total"].values()) == 2 * MIXED.n_rows * K
    assert sum(observed["capmoe_tokens_total"].values()) == MIXED.n_rows


def test_every_metric_is_there_before_the_first_request_but_no_gauge_of_a_step() -> None:
    observed = Observed("score", 0.5)
    names = {s.name for metric in observed.registry.collect() for s in metric.samples}
    gauges = {"capmoe_fullest_expert_tokens", "capmoe_effective_gamma"}
    for name, family in FAMILIES.items():
        sample = f"{name}_sum" if family.kind == "histogram" else name
        assert (sample in names) == (name not in gauges), name
    assert observed["capmoe_info"] == {("unconstrained", "0.5", "score", __version__): 1}


def test_a_server_without_a_capacity_has_no_effective_gamma() -> None:
    observed = Observed("baseline", 1.0)
    observed.compute(MIXED)
    assert not observed["capmoe_effective_gamma"]
    assert not observed["capmoe_dropped_pairs_total"]
    assert sum(observed["capmoe_kept_pairs_total"].values()) == 2 * MIXED.n_rows * K
    assert observed["capmoe_info"] == {("unconstrained", "", "baseline", __version__): 1}


def test_a_label_is_the_number_of_the_layer_in_the_model() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    def labels(*names: str) -> list[str]:
        return layer_labels([Named(name) for name in names])  # type: ignore[misc]

    assert labels("model.layers.1.mlp.experts", "model.layers.12.mlp.experts") == ["1", "12"]
    assert labels("experts", "layers.3.experts") == ["experts", "3"]
    assert labels("a.0.x", "b.0.x") == ["a.0.x", "b.0.x"]


# Several processes.


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Share metrics as a server does that was started without a directory."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")  # so that it is restored
    share_metrics()
    yield Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])


def exposed() -> dict[str, float]:
    """Return the samples without labels that ``/metrics`` would show."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return {s.name: s.value for of in registry.collect() for s in of.samples if not s.labels}


def test_counts_of_other_processes_are_seen_though_the_client_was_imported_before(
    shared: Path,
) -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge

    registry = CollectorRegistry()
    Counter("capmoe_test_total", "Here.", registry=registry).inc(2)
    Gauge("other", "Another's.", registry=registry, multiprocess_mode="mostrecent").set(7)
    child = "from prometheus_client import Counter; Counter('capmoe_test', 'There.').inc(3)"
    subprocess.run([sys.executable, "-c", child], check=True)
    assert exposed() == {"capmoe_test_total": 5, "other": 7}
    share_metrics()  # in each of a server's processes, and once more for each engine
    assert Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]) == shared


def test_a_directory_for_metrics_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "file/metrics"))
    with pytest.raises(UsageError, match=r"^PROMETHEUS_MULTIPROC_DIR[^\n]*file/metrics"):
        share_metrics()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "new/metrics"))
    share_metrics()
    assert (tmp_path / "new/metrics").is_dir()


# The dashboard.

DASHBOARD = json.loads(
    (Path(capmoe_serve.server.__file__).parent / "dashboard.json").read_text(encoding="utf-8")
)


def test_a_dashboard_asks_for_metrics_and_labels_that_there_are() -> None:
    asked = set()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            expression, legend = target["expr"], target["legendFormat"]
            labels = {"instance"}
            names = re.findall(r"\b([a-z_]+)\{", expression)
            assert names, expression
            for name in names:
                family = name
                if name not in FAMILIES:
                    family = re.sub("_(sum|count|bucket)$", "", name)
                    assert FAMILIES[family].kind == "histogram", name
                labels |= set(FAMILIES[family].labels)
                asked.add(family)
            used = re.findall(r"([a-z]+)=~?\"", expression)
            used += re.findall(r"[a-z]+", " ".join(re.findall(r"by \(([^)]*)\)", expression)))
            assert set(used) <= labels, expression
            labelled = set(re.findall(r"\{\{([a-z]+)\}\}", legend))
            assert labelled <= set(used), f"{legend} of {expression}"
            counted = all(FAMILIES[n].kind == "counter" for n in names if n in FAMILIES)
            if "rate(" in expression:
                assert counted, f"a rate of a gauge: {expression}"
    assert asked == set(FAMILIES)


def test_panels_of_a_dashboard_do_not_overlap() -> None:
    cells: Counter[tuple[int, int]] = Counter()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells.update((at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"]))
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) == 23
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


# A real engine.


def read(name: str) -> Counter[str]:
    """Return the sums of a metric of the process by phase; of one without phases by nothing."""
    from prometheus_client import REGISTRY

    total: Counter[str] = Counter()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name == name:
                total[sample.labels.get("phase", "")] += sample.value
    return total


def counted(names: tuple[str, ...], before: dict[str, Counter[str]]) -> dict[str, dict[str, float]]:
    """Return by how much metrics rose."""
    return {
        name: {phase: n - before[name][phase] for phase, n in read(name).items()} for name in names
    }


NAMES = (
    *(f"capmoe_{kind}_pairs_total" for kind in PAIRS),
    "capmoe_tokens_total",
    "capmoe_peak_load_ratio_count",
    "capmoe_peak_load_ratio_sum",
)


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("olmoe")
    make("olmoe").save_pretrained(path)
    # A step has at most 24 tokens, so that prompts are cut and steps are mixed.
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "disable_log_stats": False}
    with engine(path, create_method("score", 0.5), **limits) as started:
        yield started


@NEEDS_VLLM
@pytest.mark.slow
def test_the_metrics_of_an_engine_are_the_meter_s(olmoe: Engine) -> None:
    before, was = {name: read(name) for name in NAMES}, olmoe.report()["summary"]
    lengths, tokens = (16, 40, 24, 8), 5
    olmoe.generate(prompts(*lengths), tokens=tokens, prompt_logprobs=None)
    rose, now = counted(NAMES, before), olmoe.report()["summary"]
    layers, top_k = 2, 3
    assert rose["capmoe_tokens_total"] == {
        "prompt": sum(lengths),
        "decode": len(lengths) * (tokens - 1),
    }
    for phase, n in rose["capmoe_tokens_total"].items():
        routed, kept, dropped, added = (rose[name][phase] for name in NAMES[:4])
        assert routed == kept + dropped == n * layers * top_k
        assert added == 0
    dropped = rose["capmoe_dropped_pairs_total"]
    assert dropped == {"prompt": now["dropped"] - was["dropped"], "decode": 0}
    assert dropped["prompt"] > 0
    names = {of.split("{")[0] for of in _text().splitlines() if not of.startswith("#")}
    assert {"capmoe_routed_pairs_total", "vllm:prompt_tokens_total"} <= names


def _text() -> str:
    """Return what ``/metrics`` shows."""
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    text: str = generate_latest(registry).decode()
    return text


@NEEDS_VLLM
@pytest.mark.slow
def test_an_aborted_request_leaves_the_counts_consistent(olmoe: Engine) -> None:
    from vllm import SamplingParams

    before, was = {name: read(name) for name in NAMES}, olmoe.report()["summary"]
    core = olmoe.llm.llm_engine
    parameters = SamplingParams(max_tokens=50, detokenize=False, ignore_eos=True)
    for name, tokens in zip("abc", prompts(40, 40, 8), strict=True):
        core.add_request(name, {"prompt_token_ids": tokens}, parameters)
    for _ in range(3):
        core.step()
    core.abort_request(["a", "b"])
    for _ in range(3):
        core.step()
    core.abort_request(["c"])
    while core.has_unfinished_requests():
        core.step()
    rose, now = counted(NAMES, before), olmoe.report()["summary"]
    routed, kept, dropped, _ = (sum(rose[name].values()) for name in NAMES[:4])
    assert routed == kept + dropped == sum(rose["capmoe_tokens_total"].values()) * 2 * 3
    assert dropped == now["dropped"] - was["dropped"] > 0
