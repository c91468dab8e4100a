"""The command ``replicate``: write the verdicts on an experiment's records."""

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from capmoe_eval.errors import UsageError, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import PATH, Parser, report_options
from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.configuration import CellPlan, finished, planned, profile_name
from capmoe_eval.experiment.files import check_writable, write_bytes, write_text
from capmoe_eval.experiment.names import family
from capmoe_eval.experiment.record import VERDICTS, Record
from capmoe_eval.experiment.results import directories, read_results
from capmoe_eval.lazy import pd
from capmoe_eval.report.figures.command import images_of

from capmoe_report.claims import WORDS
from capmoe_report.contrasts import grouping
from capmoe_report.effects import by_family
from capmoe_report.evidence import Evidence, evidence_of, idle_notes
from capmoe_report.judge import check_pairs, judge, replication_claims
from capmoe_report.margins import margins
from capmoe_report.records import RECORDS, line_numbers, paths_of, record_row, to_lines
from capmoe_report.templates import render
from capmoe_report.verdicts import LEVEL, ONLY_HERE, VerdictFile

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
    report_options(parser, has_bench=False)
    parsed = parser.parse_intermixed_args(arguments)

    def report() -> int:
        config, plans = planned(["experiment=replicate", *parsed.overrides])
        profile = profile_name(config)
        records, notes = finished(plans)
        *_, shipped = directories(plans[0].root)
        nothing = UsageError(
            f"profile={profile}: no finished contrast of experiment=replicate; run "
            f"`capmoe-eval run experiment=replicate {' '.join(parsed.overrides)}` first, or "
            f"add the settings of the records that `capmoe-eval table {shipped}` shows"
        )
        if not records:
            raise nothing
        results = parsed.results or plans[0].root
        check_writable("--results", results)
        check_writable("--out", parsed.out)
        models = frozenset(plan.cell.model.name for plan in plans)
        evidence = evidence_of(profile, _alike(plans, records), models)
        file = _judged(evidence, missing=len(plans) - len(records), notes=notes)
        if not any(finding.documents for claim in file.claims for finding in claim.contrasts):
            raise nothing
        with writing("--results", results):
            write_text(results / VERDICTS, file.to_json())
        folder = parsed.out / profile
        named = [(claim.id, finding) for claim in file.claims for finding in claim.contrasts]
        named += [(row.label, gap) for row in file.grouping for gap in row.gaps]
        rows = [
            record_row(name, finding.label, finding.effect, finding.records, folder)
            for name, finding in named
            if finding.effect is not None and finding.records
        ]
        lines = line_numbers(rows)
        file = VerdictFile.model_validate_json(file.to_json())  # with its digits
        from capmoe_report.picture import draw, draw_gaps

        text = render(
            "replication.md",
            file=file,
            profile_note=WORDS["profiles"].get(profile, ""),
            lines=lines,
            used=len({path for row in rows for path in paths_of(row)}),
            only_here=ONLY_HERE,
        )
        written = {
            "replication.md": text.encode(),
            CONTRASTS: _to_csv(file, lines).encode(),
            RECORDS: to_lines(rows).encode(),
            "replication.svg": images_of(lambda: draw(file), ["svg"])["svg"],
        }
        if len(file.grouping) > 1:
            gaps = images_of(lambda: draw_gaps(file.grouping), ["svg"])
            written["gaps.svg"] = gaps["svg"]
        with writing("--out", parsed.out):
            for name, content in written.items():
                write_bytes(folder / name, content)
        print(*_lines(file), sep="\n")
        if file.missing:
            words = " ".join(["experiment=replicate", *parsed.overrides])
            print(
                f"{file.missing} of {len(plans)} evaluations are missing; compute them: "
                f"capmoe-eval run {words}"
            )
        paths = results / VERDICTS, *(folder / name for name in written)
        print("written: " + ", ".join(map(str, paths)))
        return 0

    sys.exit(run_command(report))


def _judged(evidence: Evidence, missing: int, notes: Sequence[str]) -> VerdictFile:
    """Return the verdicts on the claims; records that do not pair are a UsageError."""
    claims = replication_claims()
    check_pairs(claims, evidence)
    of_margin: dict[str, list[str]] = {}
    for claim in claims:
        for margin in {contrast.expect.margin for contrast in claim.contrasts}:
            of_margin.setdefault(margin, []).append(claim.id)
    return VerdictFile(
        profile=evidence.profile,
        models=evidence.models,
        records=len(evidence.results.cells),
        missing=missing,
        notes=(*notes, *idle_notes(evidence.losses)),
        level=LEVEL,
        margins=tuple(
            {**row, "points": round(row["points"], 5), "claims": of_margin.get(name, [])}
            for name, row in margins().items()
        ),
        claims=judge(evidence, claims),
        grouping=tuple(grouping(evidence)),
    )


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
    rows: list[dict[str, Any]] = []
    for claim in file.claims:
        for contrast in (finding.model_dump(mode="json") for finding in claim.contrasts):
            row = {"claim": claim.id, **{name: contrast[name] for name in plain.split()}}
            for name, ends in (("asked", contrast["bounds"]), ("families", contrast["wide"])):
                row[f"{name}_low"], row[f"{name}_high"] = ends or (None, None)
            effects = by_family(contrast["models"])
            row |= {name: round(effects[name], 5) if name in effects else None for name in families}
            rows.append(row | {"records_line": lines.get((claim.id, contrast["label"]))})
    text: str = pd.DataFrame(rows, dtype=object).to_csv(index=False)
    return text


def _alike(plans: Sequence[CellPlan], records: Sequence[Record]) -> tuple[Record, ...]:
    """Return all records of the experiment's models and documents, whatever made them.

    The ledger compares the same ones. The experiment's own come first.
    """

    def setting(cell: Cell) -> str:
        return repr((cell.model, cell.limit, cell.data, cell.eval_seed))

    asked = {setting(plan.cell) for plan in plans}
    results = read_results(plans[0].root, [])
    record_by_path = {record.path: record for record in (*records, *results)}
    return tuple(record for record in record_by_path.values() if setting(record.cell) in asked)
