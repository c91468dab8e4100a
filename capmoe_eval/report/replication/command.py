"""The command ``replication``: write the verdicts on an experiment's records."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser
from capmoe_eval.experiment.configuration import load_option, options, profile_name
from capmoe_eval.experiment.files import check_writable, write_bytes, write_text
from capmoe_eval.experiment.record import VERDICTS
from capmoe_eval.experiment.selection import finished, refuse_experiment
from capmoe_eval.paper.evidence import TRAININGS, Evidence, Home, read_trainings
from capmoe_eval.paper.replication.claims import find, judged, replication_claims, written_margins
from capmoe_eval.paper.verdict_file import VerdictFile
from capmoe_eval.paper.verdicts import LEVEL
from capmoe_eval.report.replication.picture import draw, to_png
from capmoe_eval.report.replication.render import to_markdown


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
        help=f"training seeds' balance (default: {TRAININGS} with profile zoo, else none)",
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
        trainings = read_trainings(given.trainings, profile)
        evidence = Evidence(profile, tuple(found.records), trainings=trainings)
        evidence = dataclasses.replace(evidence, homes=_homes(evidence))
        file = VerdictFile(
            profile=profile,
            models=evidence.models,
            records=len(found.records),
            missing=len(found.plans) - len(found.records),
            notes=(*found.notes, *found.broken),
            level=LEVEL,
            margins=written_margins(),
            claims=tuple(judged(claim, find(claim, evidence)) for claim in replication_claims()),
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


def _homes(evidence: Evidence) -> dict[str, Home]:
    """Return the models' settings: the γ of ``conf/model``, the rest as their records have it."""
    homes = {}
    for model in set(evidence.models).intersection(options("model")):
        gamma, home = load_option("model", model).gamma, evidence.home(model)
        if gamma is not None and home is not None:
            homes[model] = dataclasses.replace(home, gamma=float(gamma))
    return homes
