"""The command ``replication``: write the verdicts on an experiment's records."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser, recompute_option
from capmoe_eval.experiment.configuration import profile_name
from capmoe_eval.experiment.files import check_writable, write_bytes, write_text
from capmoe_eval.experiment.names import family
from capmoe_eval.experiment.record import VERDICTS
from capmoe_eval.experiment.results import Reader, directories
from capmoe_eval.experiment.selection import finished, refuse_experiment
from capmoe_eval.paper.effects import FILE, Effects
from capmoe_eval.paper.evidence import TRAININGS, Evidence, read_trainings
from capmoe_eval.paper.replication.claims import find, judged, replication_claims, written_margins
from capmoe_eval.paper.replication.grouping import grouping
from capmoe_eval.paper.verdict_file import VerdictFile
from capmoe_eval.paper.verdicts import LEVEL
from capmoe_eval.report.templates import render


def main(arguments: Sequence[str] | None = None, reader: Reader | None = None) -> None:
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
    recompute_option(parser)
    parser.add_argument("overrides", nargs="*", help="as for python -m capmoe_eval")
    given = parser.parse_args(arguments)

    def report() -> int:
        refuse_experiment(given.overrides)
        found = finished(["experiment=replicate", *given.overrides], reader)
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
        kept = (directory / FILE.format("replication") for directory in directories(results))
        effects = Effects(*kept, recompute=given.recompute)
        records = tuple(found.records)
        evidence = Evidence(profile, records, trainings=trainings, effects=effects)
        file = VerdictFile(
            profile=profile,
            models=evidence.models,
            records=len(records),
            missing=len(found.plans) - len(records),
            notes=(*found.notes, *found.broken),
            level=LEVEL,
            margins=written_margins(),
            claims=tuple(judged(claim, find(claim, evidence)) for claim in replication_claims()),
            grouping=grouping(evidence),
        )
        with writing("--results", results):
            write_text(results / VERDICTS, file.to_json())
        effects.write()
        from capmoe_eval.report.replication.picture import draw, draw_gaps, to_png

        folder = given.out / profile
        text = render("replication.md", **_content(file))
        with writing("--out", given.out):
            write_text(folder / "replication.md", text)
            write_bytes(folder / "replication.png", to_png(draw(file)))
            if len(file.grouping) > 1:
                write_bytes(folder / "gaps.png", to_png(draw_gaps(file.grouping)))
        print(text.partition("\n## ")[0])
        if file.missing:
            print(f"{file.missing} of {len(found.plans)} evaluations are missing")
        print(f"written: {results / VERDICTS}, {folder / 'replication.md'}, .png")
        return 0

    sys.exit(run_command(report))


def _content(file: VerdictFile) -> dict[str, object]:
    counts = Counter(claim.verdict for claim in file.claims)
    families: dict[str, list[str]] = {}  # models that differ in their training seed
    for model in file.models:
        families.setdefault(family(model), []).append(model)
    return {
        "file": file,
        "models": set(file.models),
        "families": families,
        "counts": ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
    }
