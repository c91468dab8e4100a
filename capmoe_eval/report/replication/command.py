"""The command ``replication``: write the verdicts on an experiment's records."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser
from capmoe_eval.experiment.configuration import profile_name
from capmoe_eval.experiment.files import check_writable, write_bytes, write_text
from capmoe_eval.experiment.record import VERDICTS
from capmoe_eval.experiment.selection import finished, refuse_experiment
from capmoe_eval.paper.contrasts import MARGIN
from capmoe_eval.paper.evidence import Evidence
from capmoe_eval.paper.replication.claims import find, judged, replication_claims
from capmoe_eval.paper.replication.measures import Trainings
from capmoe_eval.paper.verdict_file import VerdictFile
from capmoe_eval.paper.verdicts import LEVEL
from capmoe_eval.report.replication.render import draw, to_markdown, to_png

#: Where the balance of the trained tiny models of several training seeds is kept.
TRAININGS = Path("results/training_seeds.json")
_TRAINED = "zoo"


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge and exit: 0 written, 2 bad input."""
    parser = Parser(
        prog="python -m capmoe_eval.replication",
        description="Judge the paper's claims by the finished records of experiment=replicate.",
    )
    parser.add_argument(
        "--results", type=PATH, help=f"for {VERDICTS} (default: beside the records, results_dir)"
    )
    parser.add_argument(
        "--out", type=PATH, default=Path("reports"), help="directory (default: reports)"
    )
    parser.add_argument(
        "--trainings",
        type=PATH,
        help=f"training seeds' balance (default: {TRAININGS} with profile {_TRAINED}, else none)",
    )
    parser.add_argument("overrides", nargs="*", help="as for python -m capmoe_eval")
    given = parser.parse_args(arguments)

    def report() -> int:
        refuse_experiment(given.overrides)
        found = finished(["experiment=replicate", *given.overrides])
        profile = profile_name(found.config)
        if not found.records:
            raise UsageError(
                f"profile={profile}: no finished evaluation of experiment=replicate; run "
                f"`python -m capmoe_eval experiment=replicate {' '.join(given.overrides)}` first"
            )
        results = given.results or found.plans[0].root
        check_writable("--results", results)
        check_writable("--out", given.out)
        # Trained tiny models say nothing of other profiles, unless someone names them.
        trained = given.trainings or (TRAININGS if profile == _TRAINED else None)
        evidence, trainings = Evidence(profile, tuple(found.records)), _trainings(trained)
        file = VerdictFile(
            profile=profile,
            models=evidence.models,
            records=len(found.records),
            missing=len(found.plans) - len(found.records),
            notes=(*found.notes, *found.broken),
            level=LEVEL,
            margin=MARGIN,
            claims=tuple(
                judged(claim, find(claim, evidence, trainings)) for claim in replication_claims()
            ),
        )
        with writing("--results", results):
            write_text(results / VERDICTS, file.to_json())
        folder, text = given.out / profile, to_markdown(file)
        with writing("--out", given.out):
            write_text(folder / "replication.md", text)
            write_bytes(folder / "replication.png", to_png(draw(file)))
        print(text.partition("\n## ")[0])
        if file.missing:
            print(f"{file.missing} of {len(found.plans)} evaluations are missing")
        print(f"written: {results / VERDICTS}, {folder / 'replication.md'}, .png")
        return 0

    sys.exit(run_command(report))


def _trainings(path: Path | None) -> Trainings:
    if path is None or not path.is_file():
        return []
    try:
        trainings: Trainings = json.loads(path.read_text(encoding="utf-8"))["trainings"]
        for training in trainings:
            float(training["peaks"][0]), int(training["steps"])
            training["name"], training["origin"], training["seed"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(
            f"{path}: not a whole file of trainings ({error}); delete it, or make it anew with "
            "`python -m capmoe_eval.tiny origins`"
        ) from error
    return trainings
