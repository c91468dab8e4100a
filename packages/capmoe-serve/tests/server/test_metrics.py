"""What Prometheus sees of a server: counters by layer and phase, loads, and the dashboard."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from capmoe_eval import __version__
from capmoe_eval.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

import capmoe_serve.server
from capmoe_serve.server.engine import StepRows
from capmoe_serve.server.metrics import FAMILIES, PHASES, Metrics, layer_labels, share_metrics
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
    expected: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for step in rows:
        phases = [PHASES[is_decode] for is_decode in step.decode_N.tolist()]
        expected["tokens"].update((phase,) for phase in phases)
        expected["steps"].update((phase,) for phase in set(phases))
        for layer, call in enumerate(observed.compute(step)):
            for phase, routed, kept in zip(phases, call.chosen, call.pairs, strict=True):
                key = str(layer), phase
                expected["routed_pairs"][key] += K
                expected["kept_pairs"][key] += len(routed & kept)
                expected["dropped_pairs"][key] += len(routed - kept)
                expected["added_pairs"][key] += len(kept - routed)
    summary = observed.capacity.report()["summary"]
    for kind in ("dropped", "added"):
        assert expected[f"{kind}_pairs"].total() == summary[kind]
    observed.compute(MIXED, layers=1)  # broken off, and not counted
    for kind, counts in expected.items():
        assert observed[f"capmoe_{kind}_total"] == {key: n for key, n in counts.items() if n}


@pytest.mark.parametrize("knobs", [{}, {"granularity": "device"}, {"decode": "constrained"}])
def test_loads_and_the_effective_gamma_are_those_of_the_meter(knobs: dict[str, Any]) -> None:
    observed = Observed("score", 0.5, **knobs)
    names = {s.name for metric in observed.registry.collect() for s in metric.samples}
    for name, (kind, *_) in FAMILIES.items():  # before the first step all but gauges of a step
        sample = f"{name}_sum" if kind == "histogram" else name
        assert (sample in names) == (kind != "gauge" or name == "capmoe_info"), name
    info = observed.method.decode, "0.5", "score", __version__
    assert observed["capmoe_info"] == {info: 1}

    calls = [observed.compute(MIXED) for _ in range(3)][-1]
    under = under_method(observed.method, MIXED)
    for place, layer in enumerate(observed.capacity.report()["layers"]):
        of_layer = str(place)
        for when, rows in (("before", calls[place].chosen), ("after", calls[place].pairs)):
            key, peak = (of_layer, when), layer["peak"][f"expert_{when}"]
            assert observed["capmoe_peak_load_ratio_count"][key] == 3
            total = observed["capmoe_peak_load_ratio_sum"][key]
            assert total / 3 == pytest.approx(peak["mean"], abs=1e-6)
            load = Counter(itertools.chain.from_iterable(itertools.compress(rows, under)))
            assert observed["capmoe_fullest_expert_tokens"][key] == max(load.values())
        effective = observed["capmoe_effective_gamma"][(of_layer,)]
        assert effective == pytest.approx(layer["effective_gamma"])


def test_a_label_is_the_number_of_the_layer_in_the_model() -> None:
    def labels(*names: str) -> list[str]:
        return layer_labels([SimpleNamespace(name=name) for name in names])  # type: ignore[misc]

    assert labels("model.layers.1.mlp.experts", "model.layers.12.mlp.experts") == ["1", "12"]
    assert labels("experts", "layers.3.experts") == ["experts", "3"]
    assert labels("a.0.x", "b.0.x") == ["a.0.x", "b.0.x"]


# Several processes.


def test_counts_of_other_processes_are_seen_though_the_client_was_imported_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, multiprocess

    variable = "PROMETHEUS_MULTIPROC_DIR"
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file/metrics"))
    with pytest.raises(UsageError, match=rf"^{variable}[^\n]*file/metrics"):
        share_metrics()
    monkeypatch.setenv(variable, "")
    share_metrics()  # makes a directory, and keeps it in each of a server's processes
    directory = os.environ[variable]
    share_metrics()
    assert os.environ[variable] == directory
    Counter("capmoe_test_total", "Here.", registry=CollectorRegistry()).inc(2)
    gauge = Gauge("other", "Of others.", [], registry=None, multiprocess_mode="mostrecent")
    gauge.set(7)
    child = "from prometheus_client import Counter; Counter('capmoe_test', 'There.').inc(3)"
    subprocess.run([sys.executable, "-c", child], check=True)
    multiprocess.MultiProcessCollector(registry := CollectorRegistry())  # what /metrics shows
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    exposed = {sample.name: sample.value for sample in samples if not sample.labels}
    assert exposed == {"capmoe_test_total": 5, "other": 7}


# The dashboard.


def test_a_dashboard_asks_for_metrics_and_labels_that_there_are() -> None:
    path = Path(capmoe_serve.server.__file__).parent / "dashboard.json"
    panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
    asked = set()
    for target in (target for panel in panels for target in panel["targets"]):
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
