"""A forecast counts what a run computes, writes no record, and takes time from where it says."""

import dataclasses
from pathlib import Path

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.forecast import forecast, recorded_seconds
from capmoe_eval.evaluation.loading import load_lm, weightless
from capmoe_eval.evaluation.run import run, with_documents
from capmoe_eval.experiment.configuration import CellPlan
from tests import records


def small(*overrides: str) -> list[CellPlan]:
    return records.planned("model=tiny_olmoe", "batch_size=4", "limit=3", *overrides)


@pytest.mark.parametrize("name", ["tiny_olmoe", "zoo_mixtral"])
def test_a_forecast_has_the_documents_and_the_weights_of_what_is_missing(
    name: str, tmp_path: Path
) -> None:
    """Of a limit, every subtask has as many documents; no weights are loaded."""
    words = f"model={name}", "limit=3", "grid.gamma=[1.0,2.0]", f"results_dir={tmp_path}"
    plans = with_documents(records.planned(*words, "tasks=[obqa,zero_shot_mix]"))
    cell, source = plans[0].cell, plans[0].source  # of obqa
    origin = {"data_fingerprint": source.fingerprint(cell.task.dataset)}
    records.record(cell, tmp_path, provenance=origin).write()
    text = forecast(plans)
    rows = {line.split()[1]: line.split() for line in text.splitlines() if line.startswith(name)}
    assert text.startswith("Missing cells: 3 of 4. None was computed now")
    assert rows["obqa"][2:4] == ["1", "3"]
    assert rows["zero_shot_mix"][2:4] == ["2", str(2 * 3 * 4)]
    assert all(weight.is_meta for weight in weightless(cell.model).parameters())
    loaded = load_lm(cell.model, "cpu", 1).model
    size = sum(p.numel() * p.element_size() for p in loaded.parameters()) / 2**30
    assert f"{name}: {size:.2f} GiB of weights" in text
    assert text.splitlines()[-1].startswith("The time is not known; a cell of few documents")


def test_its_times_are_of_like_records_alone(tmp_path: Path) -> None:
    (plan,) = small("tasks=obqa", "gamma=1.0", f"results_dir={tmp_path}")
    (record,) = run([plan]).records
    assert recorded_seconds(plan) == [record.provenance.seconds / 3]
    for change in (
        {"batch_size": 2},
        {"model": dataclasses.replace(plan.cell.model, dtype="bfloat16")},
    ):
        other = dataclasses.replace(plan, cell=dataclasses.replace(plan.cell, **change))
        assert recorded_seconds(other) == []
    assert recorded_seconds(dataclasses.replace(plan, threads=7)) == []
    plan.path.with_name("damaged.json").write_text("{")  # another cell's, which no run reads
    assert len(recorded_seconds(plan)) == 1
    text = forecast(small("tasks=[obqa,piqa]", "gamma=2.0", f"results_dir={tmp_path}"))
    assert ["tiny_olmoe", "obqa", "1", "3"] in [line.split()[:4] for line in text.splitlines()]
    assert "for 1 of 2 rows; a cell of few documents (limit=N)" in text


def test_it_refuses_what_a_run_would_refuse(tmp_path: Path) -> None:
    """Of several cells the others are planned; a model of the hub may be elsewhere."""
    words = "gamma=1.0", "method=score", f"results_dir={tmp_path}"
    for bad, line in (
        (("tasks=obqa", "ep_size=3"), "ep_size=3: 32 experts cannot be spread evenly"),
        (("tasks=obqa", "layer_gammas=[1.0,1.0]"), "layer_gammas: 2 capacity factors for 3 MoE"),
        (("tasks=humaneval",), "allow it with allow_code_execution=true"),
        (("tasks=obqa", "tasks.obqa.fewshot=5000"), "fewshot=5000: openbookqa has 64 examples"),
        (("tasks=obqa", "decode=only"), "decode=only: obqa generates nothing"),
    ):
        for refuses in (run, forecast):
            with pytest.raises(UsageError, match=line):
                refuses(small(*words, *bad))
    text = forecast(small("tasks=obqa", "grid.ep_size=[2,3]", *words))
    assert text.startswith("Missing cells: 2 of 2.")
    assert ["tiny_olmoe", "obqa", "1", "3"] in [line.split()[:4] for line in text.splitlines()]
    assert "1 of these cells cannot be computed: ep_size=3: 32 experts cannot be" in text
    text = forecast(small("tasks=[obqa,gsm8k]", "decode=only", *words))
    assert ["tiny_olmoe", "gsm8k", "1", "3"] in [line.split()[:4] for line in text.splitlines()]
    assert "1 of these cells cannot be computed: decode=only: obqa generates" in text
    of_hub = "model=custom", "model.name=m", "model.pretrained=capmoe/none", "tasks=obqa"
    text = forecast(records.planned(*of_hub, "data.root=miniworld", *words))
    assert "m: its memory is not known" in text
