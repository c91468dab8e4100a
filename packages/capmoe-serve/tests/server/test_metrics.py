"""What Prometheus sees of a server: counters by layer and phase, loads, and the dashboard."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from capmoe_eval import __version__
from capmoe_eval.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

import capmoe_serve.server
from capmoe_serve.server.metrics import (
    FAMILIES,
    PAIRS,
    PHASES,
    Metrics,
    layer_labels,
    share_metrics,
)
from capmoe_serve.server.step import StepRows
from server.stand_ins import MIXED, K, Served
from server.test_layers import METHODS, steps, under_method


@pytest.fixture(autouse=True)
def values_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep values in memory, where registries of tests do not share them."""
    from prometheus_client import values

    monkeypatch.setattr(values, "ValueClass", values.MutexValue)


class Observed(Served):
    """Two layers under a method, with metrics of their own."""

    def __init__(self, name: str, gamma: float, **knobs: Any) -> None:
        from prometheus_client import CollectorRegistry

        super().__init__(name, gamma, **knobs)
        self.registry = CollectorRegistry()
        meter = self.capacity.meter
        meter.observe(Metrics(meter.layers, self.method, self.registry))

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
        calls = observed.compute(step)
        phases = [PHASES[is_decode] for is_decode in step.decode_N.tolist()]
        tokens.update((phase,) for phase in phases)
        n_steps.update((phase,) for phase in set(phases))
        for layer, call in enumerate(calls):
            for phase, routed, kept in zip(phases, call.chosen, call.pairs, strict=True):
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
    calls = [observed.compute(MIXED) for _ in range(3)][-1]
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
        for when, rows in (("before", calls[place].chosen), ("after", calls[place].pairs)):
            load = Counter(itertools.chain.from_iterable(itertools.compress(rows, under)))
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
    for name, (kind, *_) in FAMILIES.items():
        sample = f"{name}_sum" if kind == "histogram" else name
        assert (sample in names) == (name not in gauges), name
    assert observed["capmoe_info"] == {("unconstrained", "0.5", "score", __version__): 1}


def test_a_label_is_the_number_of_the_layer_in_the_model() -> None:
    def labels(*names: str) -> list[str]:
        return layer_labels([SimpleNamespace(name=name) for name in names])  # type: ignore[misc]

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
    for target in (target for panel in DASHBOARD["panels"] for target in panel["targets"]):
        expression = target["expr"]
        names = re.findall(r"\b([a-z_]+)\{", expression)
        families = [name if name in FAMILIES else name.rpartition("_")[0] for name in names]
        kinds = [FAMILIES[name][0] for name in families]
        assert kinds, expression
        labels = {"instance", *(label for name in families for label in FAMILIES[name][2])}
        used = re.findall(r"([a-z]+)=~?\"", expression)
        used += re.findall(r"[a-z]+", " ".join(re.findall(r"by \(([^)]*)\)", expression)))
        assert set(used) <= labels, expression
        assert set(re.findall(r"\{\{([a-z]+)\}\}", target["legendFormat"])) <= set(used)
        assert "rate(" not in expression or "gauge" not in kinds, f"a rate of a gauge: {expression}"
        asked.update(families)
    assert asked == set(FAMILIES)
