"""The first page: what is there, what is missing, what came out."""

from __future__ import annotations

from pathlib import Path

from capmoe_eval.site import page
from capmoe_eval.site.claims import Judged, ledger_path, read_verdicts
from capmoe_eval.site.figures import figure_names
from capmoe_eval.site.inventory import Experiment, Inventory
from capmoe_eval.site.listing import broken_files
from capmoe_eval.site.markup import Child, Markup, element
from capmoe_eval.site.page import Address, badge, notice

_ABOUT = (
    "A reproduction of “Capacity-Aware Inference: Mitigating the Straggler Effect in Mixture of "
    "Experts” (ICLR 2026, arXiv 2503.05066): what a limit on the tokens of an expert costs, and "
    "whom to drop. Everything here is made from records, one JSON file for each evaluation."
)


def overview_page(inventory: Inventory, replication: Path, address: Address) -> str:
    """Return the first page.

    Args:
        inventory: What is there.
        replication: The JSON file that the replication writes.
        address: Where the page will be.
    """
    return page.frame(
        address,
        "Capacity-aware inference, reproduced",
        inventory.profile,
        element("p", _ABOUT),
        [element("p", element("strong", note)) for note in inventory.notes],
        broken_files(inventory),
        _promises(inventory, address),
        _verdicts(inventory, replication, address),
        _picture(inventory.profile, address),
        _counts(inventory, address),
        _tables(inventory, address),
    )


def _promises(inventory: Inventory, address: Address) -> Markup | None:
    if not inventory.broken_promises:
        return None
    links = [
        element("li", element("a", str(record.cell), href=address.to(page.cell_path(record))))
        for record in inventory.broken_promises
    ]
    told = "A promise was broken in these evaluations; their numbers must not be used:"
    return notice(element("p", element("strong", told)), element("ul", links))


def _picture(profile: str, address: Address) -> Markup | None:
    path = address.out / profile / "replication.png"
    if not path.is_file():
        return None
    told = "Each contrast of the main claims: effect, 95 % confidence interval, every model."
    return element(
        "figure",
        element(
            "div",
            element("img", src=address.to_file(path), alt="Effects of the main claims' contrasts"),
            class_="paper",
        ),
        element("figcaption", told),
        class_="picture",
    )


def _verdicts(inventory: Inventory, replication: Path, address: Address) -> Markup | None:
    profile = inventory.profile
    files = (
        ("The main claims, tested", read_verdicts(replication, profile)),
        ("Every claim and number", read_verdicts(ledger_path(address.out, profile), profile)),
    )
    lines = [
        element("tr", element("th", name, scope="row"), element("td", _count(found)))
        for name, found in files
        if found is not None
    ]
    if not lines:
        return None
    link = element("a", "Claims", href=address.to(page.CLAIMS))
    table = element("table", element("tbody", page.rows(lines)), class_="pairs")
    return element("section", element("h2", "Verdicts"), table, element("p", "All of them: ", link))


def _count(found: Judged) -> Child:
    if found.problem:
        return found.problem
    return [[" " if i else "", badge(w), f" {n}"] for i, (w, n) in enumerate(found.counts.items())]


def _counts(inventory: Inventory, address: Address) -> Markup:
    records = inventory.records
    figures = len(figure_names(address.out / inventory.profile / "figures"))
    profiles = ", ".join(f"{name} ({count} files)" for name, count in inventory.profiles.items())
    found: list[tuple[str, Child]] = [
        ("Whole records", element("a", f"{len(records):,}", href=address.to(page.RECORDS))),
        ("Files that are no whole record", f"{len(inventory.broken):,}"),
        ("Records with a broken promise", f"{len(inventory.broken_promises):,}"),
        ("Models", ", ".join(sorted({record.model for record in records})) or "none"),
        ("Tasks", ", ".join(sorted({record.task for record in records})) or "none"),
        ("Figures", element("a", str(figures), href=address.to(page.FIGURES))),
        ("Benchmark files", _benchmarks(inventory, address)),
        ("Profiles with results", profiles or f"{inventory.profile} (0 files)"),
    ]
    return element("section", element("h2", "What is there"), page.pairs(found))


def _benchmarks(inventory: Inventory, address: Address) -> Child:
    bench = inventory.bench
    count = len(bench.studies) + len(bench.evaluations)
    emulated = sum(study.emulated for study in bench.studies)
    targets = [t for found in bench.evaluations for t in found.targets if t.met is not None]
    told = []
    if emulated:
        told.append(f"{emulated} of expert parallelism EMULATED")
    if targets:
        told.append(f"{sum(t.met is True for t in targets)} of {len(targets)} targets met")
    if bench.broken:
        told.append(f"{len(bench.broken)} unreadable")
    link = element("a", str(count), href=address.to(page.EFFICIENCY))
    return [link, f" ({', '.join(told)})" if told else None]


def _tables(inventory: Inventory, address: Address) -> Markup:
    headings = (
        "Table",
        "Cells",
        "Finished",
        "Unreadable",
        "Missing",
        "The command for the missing",
    )
    heads = [element("th", text_, scope="col") for text_ in headings]
    lines = [_table(experiment, inventory, address) for experiment in inventory.experiments]
    table = element(
        "table", element("thead", element("tr", heads)), element("tbody", page.rows(lines))
    )
    box = element("div", table, class_="wide", tabindex="0", role="region", aria_label="Tables")
    return element("section", element("h2", "Tables"), box)


def _table(experiment: Experiment, inventory: Inventory, address: Address) -> Markup:
    key = experiment.layout.key
    link = element("a", key, href=f"{address.to(page.TABLES)}#{key}")
    head = element("th", link, scope="row")
    if experiment.problem:
        return element("tr", head, element("td", experiment.problem, colspan=5))
    counts = (
        len(experiment.planned),
        len(experiment.records),
        experiment.broken,
        experiment.missing,
    )
    words = " ".join([f"experiment={key}", *inventory.overrides])
    command = element("code", f"python -m capmoe_eval {words}") if experiment.missing else "–"
    cells = [element("td", f"{count:,}", class_="number") for count in counts]
    return element("tr", head, cells, element("td", command))
