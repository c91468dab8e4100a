"""The first page of a report, and those of figures and of images: what each shows, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from capmoe_eval.paper.benchmarks import Bench
from capmoe_eval.paper.layout import TABLES
from capmoe_eval.paper.verdicts import VerdictFile
from capmoe_eval.report.claims.render import LedgerFile
from capmoe_eval.report.figures import catalogue
from capmoe_eval.report.site import page
from capmoe_eval.report.site.blocks import (
    Block,
    Code,
    DataCell,
    DataRow,
    DataTable,
    Drawing,
    Notes,
    Notice,
    Pairs,
    Prose,
    Section,
    badge,
    element,
    head,
    joined,
    link,
)
from capmoe_eval.report.site.claims import judgement, read_verdicts, verdict_counts
from capmoe_eval.report.site.inventory import Inventory, missing_cells, read
from capmoe_eval.report.site.page import Address
from capmoe_eval.report.site.sources import LEDGER, contrast_links
from capmoe_eval.report.site.tables import table_section

# Overview.

_ABOUT: Final = (
    "A reproduction of “Capacity-Aware Inference: Mitigating the Straggler Effect in Mixture of "
    "Experts” (ICLR 2026, arXiv 2503.05066): what a limit on the tokens of an expert costs, and "
    "whom to drop. Everything here is made from records, one JSON file for each evaluation. "
    "Records of other models than the paper's test its claims and reproduce no number of it."
)


def overview_page(inventory: Inventory, address: Address) -> str:
    """Return the first page: what is there, what is missing, what came out."""
    profile, records = inventory.profile, inventory.records
    failed = [link(address.to_record(record), record) for record in records if record.broken]
    blocks: list[Block] = [Prose(_ABOUT), *page.strong(inventory.notes)]
    blocks += page.left_out(inventory.broken, "is no whole record and", "are no whole records and")
    if failed:
        text = "An invariant failed in these evaluations; their numbers must not be used:"
        blocks.append(Notice(text, failed))
    blocks += _verdicts(inventory, address)
    picture = address.out / profile / "replication.png"
    if picture.is_file():
        text = "Each contrast of the main claims: effect, 95 % confidence interval, every model."
        title = "Effects of the main claims' contrasts"
        blocks.append(Drawing(title, address.to_file(picture), [Prose(text)]))
    bench, figures = inventory.bench, len(_figure_names(_figure_folder(inventory, address)))
    files = link(address.to(page.EFFICIENCY), len(bench.studies) + len(bench.evaluations))
    about = ", ".join(_about_benchmarks(bench))
    of_images = sum(record.images for record in records)
    profiles = inventory.profiles or {profile: 0}
    pairs = {
        "Whole records": link(address.to(page.RECORDS), f"{len(records):,}"),
        "Whole records of questions about images": link(address.to(page.IMAGES), f"{of_images:,}"),
        "Files that are no whole record": f"{len(inventory.broken):,}",
        "Records in which an invariant failed": f"{len(failed):,}",
        "Models": ", ".join(sorted({record.model for record in records})) or "none",
        "Tasks": ", ".join(sorted({record.task for record in records})) or "none",
        "Figures": link(address.to(page.FIGURES), figures),
        "Benchmark files": joined([files, f" ({about})"], "") if about else files,
        "Profiles with results": ", ".join(f"{name} ({n} files)" for name, n in profiles.items()),
    }
    blocks.append(Section("What is there", [Pairs(pairs.items())]))
    headings = (
        "Table",
        "Cells",
        "Finished",
        "Unreadable",
        "Missing",
        "The command for the missing",
    )
    rows = [_cells_of_table(key, inventory, address) for key in inventory.experiments]
    tables = DataTable("Tables", headings, [rows], is_sortable=False)
    return page.render_page(
        address,
        "Capacity-aware inference",
        profile,
        [*blocks, Section("Tables", [tables])],
    )


def _verdicts(inventory: Inventory, address: Address) -> list[Block]:
    profile = inventory.profile
    ledger = address.out / profile / LEDGER
    files = {
        "The main claims, tested": read_verdicts(VerdictFile, inventory.verdicts(), profile),
        "Every claim and number": read_verdicts(LedgerFile, ledger, profile),
    }
    rows = []
    for name, file in files.items():
        if isinstance(file, str):
            rows.append((name, file))
        elif isinstance(file, VerdictFile):
            rows.append((name, file.summary))
        elif file is not None:
            counts = verdict_counts(file).items()
            rows.append((name, joined(joined([str(n), badge(w)], " ") for w, n in counts)))
    everything = joined(["All of them: ", link(address.to(page.CLAIMS), "Claims")], "")
    return [Section("Verdicts", [Pairs(rows), Prose(everything)])] if rows else []


def _about_benchmarks(bench: Bench) -> list[str]:
    emulated = sum(study.emulated for study in bench.studies)
    targets = [t for file in bench.evaluations for t in file.targets if t.met is not None]
    counts = {
        f"{emulated} of expert parallelism EMULATED": emulated,
        f"{sum(t.met is True for t in targets)} of {len(targets)} targets met": len(targets),
        f"{len(bench.broken)} unreadable": len(bench.broken),
    }
    return [text for text, count in counts.items() if count]


def _cells_of_table(key: str, inventory: Inventory, address: Address) -> DataRow:
    table, name = inventory.experiments[key], link(f"{address.to(page.TABLES)}#{key}", key)
    if isinstance(table, str):
        return DataRow([head(name), DataCell(table)])
    missing = missing_cells(table)
    counts = [len(table.plans), len(table.records), len(table.broken), missing]
    words = ["capmoe-eval run", f"experiment={key}", *inventory.overrides]
    command = element("code", " ".join(words)) if missing else "–"
    numbers = [DataCell(f"{count:,}", "number") for count in counts]
    return DataRow([head(name), *numbers, DataCell(command)])


# Figures, and what is about images.

_FIGURE_FORMATS: Final = {"svg": "SVG", "pdf": "PDF", "png": "PNG", "json": "numbers"}
IMAGE_TABLES: Final = ("table4", "table8", "table9")
IMAGE_FIGURES: Final = tuple(
    spec.name
    for spec in catalogue.figures().values()
    if any("images" in name for name in (spec.experiment, *spec.parts))
)
IMAGE_CLAIMS: Final = ("l", "m", "n", "o", "o2")
"""The letters of the replication's claims about images."""


class MissingRecords(BaseModel):
    """The records that a figure lacks, of so many, and the commands that compute them."""

    records: int
    of: int
    commands: list[str]


class FigureText(BaseModel):
    """The words beside a figure, from the file of `capmoe_eval.report.figures.write`."""

    title: str
    place: str
    caption: str
    notes: list[str]
    missing: MissingRecords


def figures_page(inventory: Inventory, address: Address) -> str:
    """Return the page of all figures of a profile in ``<out>/<profile>/figures/``."""
    folder = _figure_folder(inventory, address)
    blocks: list[Block] = [_figure(name, folder, address) for name in _figure_names(folder)]
    text = page.unwritten("No figure has been drawn yet:", "figure all", inventory.profile)
    return page.render_page(address, "Figures", inventory.profile, blocks or [text])


def _figure_folder(inventory: Inventory, address: Address) -> Path:
    return address.out / inventory.profile / "figures"


def _figure_names(folder: Path) -> list[str]:
    """Return the figures of a directory: the paper's by number, those of v1, then the others."""
    names = {path.stem for suffix in ("json", "svg") for path in folder.glob(f"*.{suffix}")}

    def order(name: str) -> tuple[int, list[tuple[int, int, str]]]:
        kind = 0 if name.startswith("fig") else 1 if name.startswith("v1_") else 2
        return kind, page.natural(name)

    return sorted(names, key=order)


def _figure(name: str, folder: Path, address: Address) -> Drawing:
    """Return a figure with its words, or that it has not been drawn."""
    drawn, about = folder / f"{name}.svg", read(FigureText, folder / f"{name}.json")
    above: list[Block] = []
    caption: list[Block] = []
    if isinstance(about, str):
        title = name
        above.append(Notice(f"Its caption is missing: {about}."))
    else:
        title, missing = about.title, about.missing
        above += [Prose(about.place, "place")] if about.place else []
        caption += [Prose(about.caption)] if about.caption else []
        caption += [Notes(about.notes, "notes")] if about.notes else []
        if missing.records:
            text = f"{missing.records} of {missing.of} records are missing"
            caption.append(Code("\n".join(missing.commands), text))
    if not drawn.is_file():
        above.append(Notice("It has not been drawn."))
    caption += address.files("Files:", folder / name, _FIGURE_FORMATS)
    image = address.to_file(drawn) if drawn.is_file() else ""
    return Drawing(title, image, caption, above, name)


def images_page(inventory: Inventory, address: Address) -> str:
    """Return the page of images; of a profile without a model of them it says why it is empty."""
    profile, experiment = inventory.profile, inventory.experiments.get(IMAGE_TABLES[0])
    blocks: list[Block] = [
        Prose(
            "What a capacity does to a model that reads images (§5.3, Appendix C), and how much "
            "depends on which modality is dropped first."
        )
    ]
    if isinstance(experiment, str):
        blocks.append(Notice(f"Nothing of it can be shown: {experiment}"))
        return page.render_page(address, "Images and text", profile, blocks)
    targets = (" ".join((*IMAGE_TABLES, *IMAGE_FIGURES)), "replicate")
    folder = _figure_folder(inventory, address)
    drawn = _figure_names(folder)
    undrawn = [name for name in IMAGE_FIGURES if name not in drawn]
    blocks += [
        *page.strong(experiment.notes if experiment else ()),
        Prose("These commands compute what is missing of it, draw it, and judge the claims:"),
        Code("\n".join(f"make {names} PROFILE={profile}" for names in targets)),
        Section("Claims", [*_image_claims(inventory, address)]),
        *(
            table_section(layout, inventory, address)
            for layout in TABLES
            if layout.key in IMAGE_TABLES
        ),
        *(_figure(name, folder, address) for name in IMAGE_FIGURES if name in drawn),
    ]
    if undrawn:
        blocks.append(Notice(f"Not drawn yet: {', '.join(undrawn)}."))
    return page.render_page(address, "Images and text", profile, blocks)


def _image_claims(inventory: Inventory, address: Address) -> Iterator[Block]:
    verdicts = read_verdicts(VerdictFile, inventory.verdicts(), inventory.profile)
    if isinstance(verdicts, str):
        yield Notice(verdicts)
    else:
        claims = {claim.id: claim for claim in verdicts.claims} if verdicts else {}
        links = contrast_links(inventory, address)
        judged = [claims[letter] for letter in IMAGE_CLAIMS if letter in claims]
        yield from (judgement(claim, links) for claim in judged)
        if unjudged := [f"({letter})" for letter in IMAGE_CLAIMS if letter not in claims]:
            text = f"Not judged yet: {', '.join(unjudged)}."
            yield page.unwritten(text, "replicate", inventory.profile)
    everything = link(address.to(page.CLAIMS), "Claims")
    yield Prose(joined(["All others, and what each number means: ", everything], ""))
