"""The command ``replication``: write the verdicts on an experiment's records."""

from __future__ import annotations

import csv
import io
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.configuration import profile_name
from capmoe_eval.experiment.files import check_writable, write_bytes, write_text
from capmoe_eval.experiment.names import family
from capmoe_eval.experiment.record import VERDICTS, Record
from capmoe_eval.experiment.results import read_results
from capmoe_eval.experiment.selection import Finished, finished, refuse_experiment

from capmoe_report.effects import by_family
from capmoe_report.evidence import Evidence, gather
from capmoe_report.grouping import grouping
from capmoe_report.judge import (
    check_pairs,
    findings_of,
    judge,
    of_claims,
    replication_claims,
)
from capmoe_report.ledger import profile_note
from capmoe_report.margins import written_margins
from capmoe_report.records import RECORDS, contrast_records
from capmoe_report.templates import render
from capmoe_report.trainings import TRAININGS
from capmoe_report.verdicts import LEVEL, ONLY_HERE, JudgedClaim, VerdictFile

CONTRASTS: Final = "contrasts.csv"
"""The numbers of every contrast, beside replication.md."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge and exit: 0 written, 2 bad input."""
    parser = Parser(
        prog="capmoe-eval replicate",
        description="Test the paper's claims on every model of a profile: effects, intervals and "
        "verdicts, from the finished records of experiment=replicate.",
    )
    parser.add_argument(
        "--results", type=PATH, help=f"directory for {VERDICTS} (default: results_dir)"
    )
    parser.add_argument(
        "--out",
        type=PATH,
        default=Path("reports"),
        help="directory of the report (default: reports)",
    )
    parser.add_argument(
        "--trainings",
        type=PATH,
        help=f"file of the balance by training seed (default: {TRAININGS} for profile zoo)",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for capmoe-eval run")
    parsed = parser.parse_args(arguments)

    def report() -> int:
        refuse_experiment(parsed.overrides)
        cells = finished(["experiment=replicate", *parsed.overrides])
        profile = profile_name(cells.config)
        if not cells.records:
            raise UsageError(
                f"profile={profile}: no finished evaluation of experiment=replicate; run "
                f"`capmoe-eval run experiment=replicate {' '.join(parsed.overrides)}` first"
            )
        results = parsed.results or cells.plans[0].root
        check_writable("--results", results)
        check_writable("--out", parsed.out)
        models = frozenset(plan.cell.model.name for plan in cells.plans)
        alike = _alike(cells)
        evidence = gather(profile, alike, models, trainings=parsed.trainings)
        file = VerdictFile(
            profile=profile,
            models=evidence.models,
            records=len(evidence.results.cells),
            missing=len(cells.plans) - len(cells.records),
            notes=(*cells.notes, *evidence.losses.notes, *cells.broken),
            level=LEVEL,
            margins=written_margins(replication_claims()),
            claims=judged(evidence),
            grouping=grouping(evidence),
        )
        with writing("--results", results):
            write_text(results / VERDICTS, file.to_json())
        folder = parsed.out / profile
        contrasts = contrast_records(file, folder)
        file = VerdictFile.model_validate_json(file.to_json())  # with its digits
        from capmoe_report.picture import draw, draw_gaps, to_png

        text = render(
            "replication.md",
            file=file,
            profile_note=profile_note(profile),
            lines=contrasts.lines(),
            used=len({path for contrast in contrasts.root for path in contrast.paths}),
            only_here=ONLY_HERE,
        )
        written = {
            "replication.md": text.encode(),
            CONTRASTS: _to_csv(file, contrasts.lines()).encode(),
            RECORDS: contrasts.to_json().encode(),
            "replication.png": to_png(draw(file)),
        }
        if len(file.grouping) > 1:
            written["gaps.png"] = to_png(draw_gaps(file.grouping))
        with writing("--out", parsed.out):
            for name, content in written.items():
                write_bytes(folder / name, content)
        print(*_lines(file), sep="\n")
        if file.missing:
            words = " ".join(["experiment=replicate", *parsed.overrides])
            print(
                f"{file.missing} of {len(cells.plans)} evaluations are missing; compute them: "
                f"capmoe-eval run {words}"
            )
        paths = results / VERDICTS, *(folder / name for name in written)
        print("written: " + ", ".join(map(str, paths)))
        return 0

    sys.exit(run_command(report))


def judged(evidence: Evidence) -> tuple[JudgedClaim, ...]:
    """Return the claims of the replication with their verdicts.

    Records that do not pair are a UsageError.
    """
    claims = replication_claims()
    check_pairs(claims, evidence)
    written = []
    for claim, rows in of_claims(judge(evidence, claims), claims):
        word, scope = rows[["conclusion", "of"]].iloc[0]
        judged_claim = JudgedClaim(
            id=claim.id,
            beyond=bool(claim.beyond),
            place=claim.place,
            statement=claim.statement,
            verdict=word,
            scope=scope,
            decided_by="".join(rows["label"][rows["decides"]]),
            refuted_by=claim.refuted_by,
            note=f"{claim.beyond or ''} {claim.note}".strip(),
            contrasts=tuple(findings_of(rows[rows["label"] != ""])),
        )
        written.append(judged_claim)
    return tuple(written)


def _lines(file: VerdictFile) -> Iterator[str]:
    """Yield a line for each claim, as wide as a screen, then the notes and the counts."""
    for claim in file.claims:
        statement = textwrap.shorten(claim.statement, 62, placeholder=" …")
        scope = f" {ONLY_HERE}" if claim.scope.startswith(ONLY_HERE) else ""
        yield f"{f'({claim.id})':5} {claim.verdict + scope:28}  {statement}"
    yield from (f"Note: {note}" for note in file.notes)
    yield (
        f"{len(file.claims)} claims judged by {file.records} records of {len(file.models)} models, "
        f"profile {file.profile}: {file.summary}"
    )


def _to_csv(file: VerdictFile, lines: Mapping[tuple[str, str], int]) -> str:
    """Return every contrast with its numbers, and the line of its records in :data:`RECORDS`."""
    plain = "label verdict unit effect low high p detectable conditional documents compared note"
    families = dict.fromkeys(map(family, file.models))
    ends = [f"{name}_{end}" for name in ("asked", "families") for end in ("low", "high")]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("claim", *plain.split(), *ends, *families, "records_line"))
    for claim in file.claims:
        for contrast in (finding.model_dump(mode="json") for finding in claim.contrasts):
            pairs = (*(contrast["bounds"] or ("", "")), *(contrast["wide"] or ("", "")))
            by_name = by_family(contrast["models"])
            effects = (round(by_name[x], 5) if x in by_name else None for x in families)
            line = lines.get((claim.id, contrast["label"]))
            values = (contrast[name] for name in plain.split())
            rows.writerow((claim.id, *values, *pairs, *effects, line))
    return text.getvalue()


def _alike(cells: Finished) -> tuple[Record, ...]:
    """Return all records of the experiment's models and documents, whatever made them.

    The ledger compares the same ones. The experiment's own come first.
    """

    def setting(cell: Cell) -> str:
        return repr((cell.model, cell.limit, cell.data, cell.eval_seed))

    asked = {setting(plan.cell) for plan in cells.plans}
    results = read_results(cells.plans[0].root, [])
    records = {record.path: record for record in (*cells.records, *results)}
    return tuple(record for record in records.values() if setting(record.cell) in asked)
