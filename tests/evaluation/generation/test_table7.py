"""Table 7's cells: which there are, that decode steps matter, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation import run as run_module
from capmoe_eval.evaluation.run import run
from tests.records import planned

ALLOWED = "allow_code_execution=true"


def test_there_is_a_cell_for_each_entry_of_the_table() -> None:
    plans = planned("experiment=table7", "profile=zoo")
    assert {plan.cell.task.name for plan in plans} == {"humaneval", "nq_open", "mts_dialog"}
    # Without a capacity decode steps have none either.
    methods = Counter((plan.cell.method.name, plan.cell.method.decode) for plan in plans)
    drops = ("score", "expanded_drop")
    every = {(name, decode): 9 for name in drops for decode in ("unconstrained", "constrained")}
    assert methods == {("baseline", "unconstrained"): 9, **every}
    assert {plan.cell.method.uniform_gamma for plan in plans} == {None, 1.0}
    assert {plan.cell.digest for plan in plans} <= {
        plan.cell.digest for plan in planned("experiment=replicate", "profile=zoo")
    }


def test_a_capacity_on_every_step_changes_what_is_written(tmp_path: Path) -> None:
    plans = planned(
        *("experiment=table7", "grid.model=[zoo_olmoe]", "grid.tasks=[mts_dialog]"),
        # One group: alone on its rank, a sequence would lose nothing in a step.
        *("grid.method=[score]", "limit=6", "ep_size=1", f"results_dir={tmp_path}"),
    )
    alone, every = run(plans).records
    assert alone.knobs["decode"] == "unconstrained" and every.knobs["decode"] == "constrained"
    scores = [next(iter(found.subtasks.values())).correct for found in (alone, every)]
    assert scores[0] != scores[1]
    assert alone.load.decode is None and every.load.decode is not None
    assert every.load.decode.drop_rate > 0
    # Scores are fractions, and the note is longer than one token.
    assert any(0 < score < 1 for score in scores[0])
    assert alone.load.decode_forwards > 10


WORDS = ("experiment=table7", "profile=tiny", "grid.model=[tiny_olmoe]", "grid.method=[baseline]")


def test_programs_do_not_run_unasked_and_the_other_cells_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = planned(*WORDS, "limit=1", f"results_dir={tmp_path}")
    outcome = run(plans)
    assert [record.task for record in outcome.records] == ["nq_open", "mts_dialog"]
    ((cell, reason),) = outcome.failures
    assert cell == "tiny_olmoe humaneval baseline" and ALLOWED in reason
    # Where nothing else is missing, it is a mistake, and no model is loaded.
    monkeypatch.setattr(
        run_module._Work, "records", lambda *_: pytest.fail("something was computed")
    )
    with pytest.raises(UsageError, match=ALLOWED):
        run(plans)
