"""``parallel=ep``: an evaluation by several processes gives the record of one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.run import check_processes
from capmoe_eval.experiment.results import record_paths
from tests.conftest import Shell
from tests.records import planned, undated
from tests.satellites import HAS_METHODS, NEEDS_METHODS
from tests.wrapper.parallel.processes import run_nodes

# One command computes all of it: choices, what is written, methods that the ranks must agree on.
WORDS = [
    "model=tiny_olmoe",
    "ep_size=2",
    "batch_size=5",
    "limit=2",
    "trace_tokens=850",  # the first decode steps of GSM8K
    "+parts.choices={method: [score,expanded_drop,expert_drop,random], tasks: [obqa],gamma: [1.0]}",
    "+parts.written={gamma: [1.0], method: [score], tasks: [gsm8k]}",
]
if HAS_METHODS:
    WORDS += ["+parts.adaptive={method: [score], tasks: [obqa], gamma: [adaptive], budget: [0.2]}"]


def records(root: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(root)): json.loads(path.read_text()) for path in record_paths(root)
    }


def without_origin(record: dict[str, Any]) -> dict[str, Any]:
    """Leave out when, where and how: that differs."""
    part: dict[str, Any] = undated(record)["capmoe"]
    for name in ("parallel", "git_revision"):
        del part["provenance"][name]
    part["proofs"]["stock_at_infinity"].pop("compared", None)
    agrees = part["proofs"].pop("kernel_agrees")
    spread = record["capmoe"]["provenance"]["parallel"]
    assert agrees["passed"] is (None if spread else True)
    outputs = part["proofs"].pop("outputs_as_defined")  # which one process alone compares
    assert outputs["passed"] is None if spread else outputs["passed"] is not False
    if "calibration" in part:  # its scores are sums in another order
        del part["calibration"]["checksum"]
        part["calibration"]["dropped_scores"] = round(part["calibration"]["dropped_scores"], 4)
    for layer in part["layers"]:
        layer["weight_deviation"] = round(layer["weight_deviation"], 5)
    return part


@pytest.mark.nightly
def test_two_nodes_give_the_records_of_one_process(tmp_path: Path, shell: Shell) -> None:
    root, other = tmp_path / "spread", tmp_path / "alone"
    of_nodes, of_one = (
        [*WORDS, f"results_dir={at / 'records'}", f"save_trace={at / 'traces'}"]
        for at in (root, other)
    )
    first, second = run_nodes(["-m", "capmoe_eval", *of_nodes, "parallel=ep"], 2, timeout=180)
    assert "6 computed, 0 finished before, 0 failed" in first
    assert second == "", "rank 1 speaks, too"
    assert shell(*of_one)[0] == 0
    compare_traces(root / "traces", other / "traces")
    ours, theirs = records(root / "records"), records(other / "records")
    assert ours.keys() == theirs.keys()
    assert len(ours) == 6
    for path, record in ours.items():
        assert without_origin(record) == without_origin(theirs[path]), path
        assert record["results"] == theirs[path]["results"]
        origin = record["capmoe"]["provenance"]["parallel"]
        assert origin == {"kind": "ep", "ranks": 2, "backend": "gloo"}
        assert theirs[path]["capmoe"]["provenance"]["parallel"] is None
    # What is finished stays: the same cells, whoever computed them.
    status, printed, _ = shell(*WORDS, f"results_dir={root / 'records'}")
    assert (status, "0 computed, 6 finished before" in printed) == (0, True)


def compare_traces(ours: Path, theirs: Path) -> None:
    """The tokens of both ranks are one trace, in the order of one process."""
    # Here, since the tests of SLURM import this module beside an installed suite alone.
    from capmoe_serve.trace import load_trace

    names = [sorted(str(path.relative_to(at)) for path in at.rglob("*")) for at in (ours, theirs)]
    assert names[0] == names[1]
    assert sum(name.endswith(".npz") for name in names[0]) == 6
    for name in (name for name in names[0] if name.endswith(".npz")):
        spread, whole = load_trace(ours / name), load_trace(theirs / name)
        for field in ("expert_TLK", "step_T", "decode_S"):
            np.testing.assert_array_equal(getattr(spread, field), getattr(whole, field), name)
        np.testing.assert_allclose(spread.score_TLK, whole.score_TLK, rtol=1e-3, atol=1e-6)
        assert (spread.source, spread.layers) == (whole.source, whole.layers)
        assert bool(whole.decode_steps) == ("gsm8k" in name)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tasks=obqa", "ep_size=4"], "ep_size=4: 2 processes were started"),
        pytest.param(
            ["method=macs", "tasks=mmbench", "model=tiny_llava_olmoe"],
            "method=macs: weighs the tokens",
            marks=NEEDS_METHODS,
        ),
        (["tasks=obqa", "device_map=auto", "ep_size=2"], "device_map=auto: under parallel=ep"),
    ],
)
def test_what_two_processes_cannot_share_is_refused(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (plan,) = planned("parallel=ep", *words)
    with pytest.raises(UsageError, match=f"^{line}"):
        check_processes(plan)
