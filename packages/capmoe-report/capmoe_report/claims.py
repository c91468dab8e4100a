"""The command ``claims``: judge every claim of the paper, and write the ledger."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from capmoe_bench.timings import read_bench
from capmoe_eval.errors import UsageError, bad_choice, writing
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.arguments import Parser, report_options
from capmoe_eval.experiment.composition import composed
from capmoe_eval.experiment.configuration import profile_name
from capmoe_eval.experiment.files import check_writable, read_data, write_text
from capmoe_eval.experiment.results import LOCAL, read_results, record_places

from capmoe_report.evidence import evidence_of, limit_notes, models_of
from capmoe_report.judge import IN_PRINT, judge, paper_claims
from capmoe_report.verdicts import JudgedClaim, VerdictFile

LEDGER: Final = "claims.json"
"""The name of the file, in the directory of a profile."""
WORDS: Final = read_data(__package__, "data/words.yaml", dict[str, dict[str, str]])
"""The meanings of verdicts, notes on profiles, and the names of checks."""
_KEYS: Final = ("profile", "results_dir")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the ledger and exit: 0 written, 2 bad input."""
    parser = Parser(
        prog="capmoe-eval claims",
        description="List every claim and number of the paper with its verdict, from finished "
        "results and from the paper's own numbers.",
    )
    report_options(
        parser,
        "profile=zoo (the default), tiny or paper; results_dir=DIR (default: "
        f"results/{LOCAL}PROFILE)",
    )
    parsed = parser.parse_intermixed_args(arguments)

    def write() -> int:
        for word in parsed.overrides:
            if (key := word.partition("=")[0]) not in (*_KEYS, "hydra.searchpath"):
                raise bad_choice("key", key, _KEYS)
        config = composed(parsed.overrides)
        profile, results = profile_name(config), Path(config.results_dir)
        is_named = any(word.startswith("results_dir=") for word in parsed.overrides)
        if is_named and not results.is_dir():
            raise UsageError(f"results_dir={results}: no such directory; name one that has records")
        check_writable("--out", parsed.out)
        folder, broken, bench = parsed.out / profile, list[str](), read_bench(parsed.bench)
        records = read_results(results, broken)
        broken += bench.broken
        if not records and (is_named or record_places(results)):
            raise UsageError(
                f"results_dir={results}: no whole record there; name one that has records"
            )
        counts = Counter(record.model for record in records)
        of_profile = models_of(config.profile, counts, results)
        notes = [f"left out: {line}" for line in broken]
        notes += [
            f"left out: the records of {name} ({counts[name]}), no model of the profile"
            for name in sorted(counts.keys() - of_profile)
        ]
        records = [record for record in records if record.model in of_profile]
        evidence = evidence_of(profile, records, bench=bench)
        n_cells = len(evidence.results.cells)
        notes += limit_notes(evidence.cells) if n_cells else []
        for note in notes:
            print(note, file=sys.stderr)
        judged = judge(evidence, paper_claims())
        ledger = VerdictFile(
            profile=profile,
            models=evidence.models,
            records=n_cells,
            notes=tuple(notes),
            claims=judged,
        )
        path = folder / LEDGER
        with writing("--out", parsed.out):
            write_text(path, ledger.to_ledger(folder))
        print(f"{len(judged)} claims judged by {n_cells} records of profile {profile}")
        for _, heading, count, _ in headings(judged):
            print(f"{count:4} {heading}")
        print(f"written: {path}; `capmoe-eval report` shows the claims")
        return 0

    sys.exit(run_command(write))


def headings(judged: Sequence[JudgedClaim]) -> Iterator[tuple[str, str, int, str]]:
    """Yield each verdict, how many claims have it in print alone, how many at all, its meaning."""
    counts = Counter(claim.verdict for claim in judged)
    in_print = Counter(claim.verdict for claim in judged if claim.scope == IN_PRINT)
    for word, meaning in WORDS["verdicts"].items():
        part, count = in_print[word], counts[word]
        text = f"{word} in print" if part == count else f"{word}, {part} of them in print"
        yield word, text if part else word, count, meaning
