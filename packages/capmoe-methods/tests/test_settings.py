"""Settings of the methods: which are one, their labels, what is refused and calibrated."""

import math
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.routing.registry import calibrations, create_method
from tests.routing.test_settings import Settings, are_alike, are_different, is_refused

RESULTS = Path(__file__).parents[3] / "results" / "zoo"
BY_DEVICE = {"granularity": "device", "ep_size": 4}
ADAPTIVE = {"gamma": "adaptive", "budget": 0.1}


# That a canonical form decides as what was stated, and that each of its knobs has an effect, is
# tested of all methods in tests/routing/test_settings.py: not at γ=0, and not of weights.
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("oea", 1.0, {"ep_size": 8, "modality": "image_first"}), ("oea", None, {"rounds": 7})),
        (("sere", 1.0, {"ep_size": 8, "renormalize": "after"}), ("sere", None, {})),
        (("macs", 0.0, {"rho": 2.0}), ("score", 0.0, {})),
        (
            ("laser", None, {"peak_mass": 0.0, "renormalize": "always"}),
            ("laser", None, {"load_updates": 1, "ep_size": 4, "renormalize": "always"}),
        ),
        (("score", "adaptive", {"budget": 0.02}), ("score", None, {"budget": 0.02})),
        (("score", 0.0, BY_DEVICE), ("score", 0.0, {"placement": "eplb", **BY_DEVICE})),
    ],
)
def test_one_computation_is_one_method(first: Settings, second: Settings) -> None:
    are_alike(first, second)


def test_a_k0_that_keeps_everything_is_no_baseline() -> None:
    """K is the model's, and not known here."""
    are_different(("oea", None, {"k0": 99}), ("baseline", None, {}))


# Others are those of committed records, in tests/routing/test_settings.py.
@pytest.mark.parametrize(
    ("name", "knobs", "label"),
    [
        ("xshare", {"k0": 0, "placement": "eplb", **BY_DEVICE}, "xshare-ep4-device-eplb-k0-b0.5"),
        ("macs", {"gamma": 0.5, "delta": 0.0, "rho": 0.0}, "macs-g0.5-delta0.0-rho0.0"),
        ("laser", {"load_updates": 8}, "laser-mass0.75-viable0.25-updates8"),
    ],
)
def test_a_label_has_the_knobs_that_are_no_default(
    name: str, knobs: dict[str, Any], label: str
) -> None:
    assert create_method(name, **knobs).label == label


# The others are in tests/bad_input.py.
@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        ({"name": "xshare", "k0": -1}, "k0=-1: must be a whole number of at least 0"),
        ({"name": "macs", "gamma": 1, "delta": math.inf}, "delta=inf: must be a finite number of"),
        ({"name": "macs", "gamma": 1, "modality_threshold": 0.5}, "modality_threshold=0.5: must"),
        ({"name": "macs", "gamma": 1, "placement": "eplb"}, "placement=eplb: macs reroutes within"),
        ({"name": "laser", "viable_score": 1.0}, "viable_score=1.0: must be a number of at least"),
    ],
)
def test_bad_knobs_give_one_clear_line(knobs: dict[str, Any], line: str) -> None:
    is_refused(line, create_method, **knobs)


def test_what_does_not_fit_a_model_or_processes_is_refused() -> None:
    oea, adaptive = create_method("oea", k0=3), create_method("score", **ADAPTIVE)
    is_refused("k0=3: a token of this model has 2 experts", oea.check_layers, 1, 8, 2)
    is_refused("gamma=adaptive: a calibration chooses the γ", adaptive.check_layers, 2, 8, 2)
    is_refused("method=macs: weighs the tokens", create_method("macs", 0.5).check_processes, 2)
    create_method("laser", ep_size=4).check_processes(4)  # a rank balances its own tokens
    is_refused("ep_size=1: 4 processes", create_method("laser").check_processes, 4)


@pytest.mark.slow
@pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are in the repository alone")
def test_committed_calibrations_are_applied_as_their_records_say() -> None:
    kinds = set()
    for path in record_paths(RESULTS):
        record = read_record(path)
        cell = record.cell
        if cell.method.calibration is None:
            continue
        calibration = pkgutil.resolve_name(calibrations()[cell.method.calibration])
        place = calibration.path_of(RESULTS, cell)
        file = place.relative_to(RESULTS).as_posix()
        measured = calibration.read(place, cell, record.provenance.model["weights"])
        _, calibrated, _ = measured.applied(cell.method, file)
        assert calibrated.model_dump(mode="json") == record.summary["calibration"]
        kinds.add(cell.method.calibration)
    assert kinds == calibrations().keys()
