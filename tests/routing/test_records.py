"""The identities, labels and digests of all committed records stay."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.results import record_paths
from tests.routing.test_settings import from_identity

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.slow
@pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are in the repository alone")
def test_every_record_is_named_by_its_method() -> None:
    records = 0
    for path in (*record_paths(RESULTS / "zoo"), *record_paths(RESULTS / "real_text")):
        cell = dict(read_record(path).identity)
        method = from_identity(cell["method"])
        cell["method"] = method.identity()
        canonical = json.dumps(cell, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:10]
        assert path.name == f"{method.label}-{digest}.json"
        assert method.canonical() == method
        records += 1
    assert records > 3_000
