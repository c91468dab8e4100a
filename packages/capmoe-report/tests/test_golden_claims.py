"""The committed records give the effects and verdicts of the golden files, value by value.

``PYTHONPATH=. python packages/capmoe-report/tests/test_golden_claims.py`` writes these files.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from capmoe_bench.timings import read_bench
from capmoe_eval.experiment.results import read_results
from tests.golden.test_golden import differences
from tests.satellites import NEEDS_METHODS

from capmoe_report.contrasts import Contrast, grouping
from capmoe_report.effects import by_family
from capmoe_report.evidence import Evidence, evidence_of
from capmoe_report.judge import judge, paper_claims, replication_claims
from capmoe_report.verdicts import Finding, JudgedClaim
from tests.golden import BENCH, RESULTS, framed, read, write


@functools.cache
def evidence() -> Evidence:
    """The material of the claims: all records of profile zoo."""
    broken, bench = list[str](), read_bench(BENCH)
    material = evidence_of("zoo", read_results(RESULTS, broken), bench=bench)
    assert not (*broken, *bench.broken)
    return material


def effects() -> Iterator[dict[str, Any]]:
    """Every contrast of the replication and the ledger: effect, intervals, p values, families."""
    material = evidence()
    for contrast in contrasts().values():
        effect = material.effect(contrast.first, contrast.second, contrast.model)
        row: dict[str, Any] = {
            "contrast": str(contrast),
            "sides": _sides(contrast),
            "expect": str(contrast.expect),
            "points": effect.points,
            "documents": effect.documents,
            "records": len(effect.records),
            "unpaired": len(effect.unpaired),
        }
        if effect.points is not None:
            depth = contrast.expect.depth(effect.points)
            row |= dict(zip(("low", "high"), effect.interval(), strict=True))
            if effect.between is not None:
                row |= zip(("wide_low", "wide_high"), effect.interval(wide=True), strict=True)
            row |= {"p": effect.p(depth), "p_families": effect.p(depth, wide=True)}
            row |= {"worth": effect.worth, "detectable": effect.detectable()}
            families = by_family(effect.models)
            row["families"] = _text({name: round(value, 6) for name, value in families.items()})
            row["models"] = _text({name: round(v, 6) for name, v in effect.models.items()})
            row["tasks"] = _text({name: sorted(tasks) for name, tasks in effect.tasks.items()})
        yield row


def contrasts() -> dict[tuple[str, str], Contrast]:
    """Every contrast that a claim of the replication or of the ledger names, by what it asks."""
    named = [c for claim in (*replication_claims(), *paper_claims()) for c in claim.contrasts]
    return {(_sides(contrast), str(contrast.expect)): contrast for contrast in named}


def _sides(contrast: Contrast) -> str:
    sides = [side.model_dump(exclude_defaults=True) for side in (contrast.first, contrast.second)]
    return _text({"a": sides[0], "b": sides[1], "model": contrast.model})


def verdicts() -> Iterator[dict[str, Any]]:
    """Every verdict and every finding behind it, of the replication and the ledger."""
    material = evidence()
    yield from _judged("replication", judge(material, replication_claims()))
    for row in grouping(material):
        key = {"of": "grouping", "claim": row.label}
        distance = None if row.distance is None else round(row.distance, 5)
        yield key | {"effect": distance, "unit": "points from Table 1"}
        yield from (key | _finding(finding) for finding in row.gaps)
    yield from _judged("ledger", judge(material, paper_claims()))


def _judged(of: str, claims: Sequence[JudgedClaim]) -> Iterator[dict[str, Any]]:
    """A row for each claim, of the ledger for each check, and for each finding."""
    for claim in claims:
        key = {"of": of, "claim": claim.id}
        yield key | {"verdict": claim.verdict, "scope": claim.scope}
        for kind, (check, *findings) in claim.checks:
            source = {"source": kind} if of == "ledger" else {}
            if source:
                yield key | source | {"verdict": check.verdict.name.lower()}
            for finding in findings:
                if of == "replication" or finding.effect is not None:
                    yield key | source | _finding(finding)


def _finding(finding: Finding) -> dict[str, Any]:
    written = finding.model_dump(mode="json")
    low_high, bounds = written["wide"] or (None, None), written["bounds"] or (None, None)
    return {
        "finding": finding.label,
        **{name: written[name] for name in ("verdict", "unit")},
        **{name: written[name] for name in ("effect", "low", "high", "p", "documents")},
        **dict(zip(("wide_low", "wide_high"), low_high, strict=True)),
        **dict(zip(("at_least", "at_most"), bounds, strict=True)),
        "conditional": finding.conditional,
        "models": _text(written["models"]),
    }


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


_FOLDER: Final = Path(__file__).with_name("golden")
FILES: Final = {_FOLDER / "effects.csv": effects, _FOLDER / "verdicts.csv": verdicts}


@NEEDS_METHODS
@pytest.mark.nightly
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_records_give_the_golden_numbers(path: Path) -> None:
    assert differences(read(path), framed(FILES[path]())) == []


def test_the_page_of_verdicts_quotes_what_the_models_contradict() -> None:
    rows = read(_FOLDER / "verdicts.csv")
    claims = rows[(rows["of"] == "ledger") & rows["source"].isna()]
    contradicted = set(claims.loc[claims["verdict"] == "contradicted", "claim"])
    quotes = [c.quote for c in paper_claims() if c.id in contradicted and not c.beyond]
    page = Path("docs/explanation/verdicts.md").read_text(encoding="utf-8")
    assert quotes
    assert [quote for quote in quotes if f'"{quote}"' not in page] == []


if __name__ == "__main__":
    write(FILES)
