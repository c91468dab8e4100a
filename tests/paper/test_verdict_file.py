"""The file of the replication's verdicts, as it is written."""

from __future__ import annotations

import json
import math

from capmoe_eval.paper.verdict_file import VerdictFile, WrittenClaim, WrittenFinding
from capmoe_eval.paper.verdicts import Finding, Outcome


def test_bounds_without_an_end_are_null_and_numbers_have_five_digits() -> None:
    found = Finding(
        *("x", Outcome.HOLDS, 2.0000004, 1.0, 3.0),
        models={"m": 1.23456789},
        bounds=(-0.5, math.inf),
        wide=(0.25, 4.0),
    )
    claim = WrittenClaim(id="a", verdict="confirmed", contrasts=(WrittenFinding.of(found),))
    file = VerdictFile(profile="zoo", claims=(claim,))
    written = json.loads(file.to_json())["claims"][0]["contrasts"][0]
    assert (written["verdict"], written["effect"]) == ("confirmed", 2.0)
    assert written["bounds"] == [-0.5, None] and written["wide"] == [0.25, 4.0]
    assert written["models"] == {"m": 1.23457}
    assert VerdictFile.model_validate_json(file.to_json()) == file
