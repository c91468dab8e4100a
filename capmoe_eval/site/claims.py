"""The page of claims: the verdicts of the replication, and the ledger of the whole paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capmoe_eval.site import page
from capmoe_eval.site.inventory import Inventory
from capmoe_eval.site.loose import ABSENT, mapping, number, read_object, sequence, shown, text
from capmoe_eval.site.markup import Child, Markup, element, join
from capmoe_eval.site.page import Address, Filter, Heading, badge, notice

_LINKS = 3


@dataclass(frozen=True)
class Judged:
    """A file of verdicts.

    Attributes:
        path: Where it lies, or would.
        content: What it says; empty without it.
        problem: Why it cannot be read, or nothing.
    """

    path: Path
    content: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def claims(self) -> list[Mapping[str, Any]]:
        """Its claims."""
        return [mapping(claim) for claim in sequence(self.content.get("claims"))]

    @property
    def counts(self) -> dict[str, int]:
        """How many claims have each verdict, in the order of their first."""
        return dict(Counter(text(claim.get("verdict")) for claim in self.claims))


def read_verdicts(path: Path, profile: str) -> Judged | None:
    """Read a file of a profile's verdicts, or return None if there is none."""
    if not path.is_file():
        return None
    try:
        content = read_object(path)
    except ValueError as error:
        return Judged(path, problem=str(error))
    if content.get("profile") != profile:
        of = text(content.get("profile"))
        return Judged(path, problem=f"{path}: verdicts of profile {of}, not of {profile}")
    return Judged(path, content)


def ledger_path(out: Path, profile: str) -> Path:
    """Return where the ledger of a profile is written."""
    return out / profile / "claims.json"


def claims_page(inventory: Inventory, replication: Path, address: Address) -> str:
    """Return the page of claims.

    Args:
        inventory: What is there.
        replication: The JSON file that the replication writes.
        address: Where the page will be.
    """
    profile = inventory.profile
    ledger = read_verdicts(ledger_path(address.out, profile), profile)
    return page.frame(
        address,
        "Claims",
        profile,
        _replication(read_verdicts(replication, profile), profile, address),
        _ledger(ledger, inventory, address),
    )


def _replication(found: Judged | None, profile: str, address: Address) -> Markup:
    title = element("h2", "The main claims, tested")
    if found is None:
        command = f"python -m capmoe_eval.replication profile={profile}"
        absent = element("p", "Not judged yet: ", element("code", command))
        return element("section", title, notice(absent))
    if found.problem:
        return element("section", title, notice(element("p", found.problem)))
    about = found.content
    measured = ", ".join(text(model) for model in sequence(about.get("models")))
    told: list[Child] = [
        element(
            "p",
            f"Profile {text(about.get('profile'))}, {text(about.get('records'))} evaluations of "
            f"{measured or 'no model'}; effects are points of accuracy, in brackets the 95 % "
            "confidence interval, p corrected within a claim.",
        )
    ]
    if about.get("missing"):
        told.append(notice(element("p", f"{text(about['missing'])} evaluations are missing.")))
    told += [element("p", text(note)) for note in sequence(about.get("notes"))]
    told += [_judgement(claim) for claim in found.claims]
    link = element("a", found.path.name, href=address.to_file(found.path))
    return element("section", title, told, element("p", "From ", link))


def _judgement(claim: Mapping[str, Any]) -> Markup:
    contrasts = [mapping(contrast) for contrast in sequence(claim.get("contrasts"))]
    lines = [_contrast(contrast) for contrast in contrasts]
    headings = (
        Heading("Compared"),
        Heading("Effect", numeric=True),
        Heading("95 % interval", numeric=True),
        Heading("p", numeric=True),
        Heading("Verdict"),
        Heading("By model"),
    )
    key = text(claim.get("id"))
    notes = dict.fromkeys(text(c.get("note")) for c in contrasts if c.get("note"))
    return join(
        "\n",
        element(
            "details",
            element(
                "summary",
                badge(text(claim.get("verdict"))),
                f" ({key}) {text(claim.get('statement'))} ",
                element("small", text(claim.get("place"))),
            ),
            page.sortable(f"Contrasts of ({key})", headings, [page.rows(lines)]),
            [element("p", note) for note in notes],
            class_="judgement",
        ),
    )


def _contrast(contrast: Mapping[str, Any]) -> Markup:
    unit = contrast.get("unit")
    effect = shown(contrast.get("effect"), "{:+.2f}")
    if unit not in (None, "points") and effect != ABSENT:
        effect += f" {text(unit)}"
    models = mapping(contrast.get("models")).items()
    by_model = ", ".join(f"{name} {shown(value, '{:+.2f}')}" for name, value in models)
    return element(
        "tr",
        element("th", text(contrast.get("label")), scope="row"),
        element("td", effect, class_="number", data_value=number(contrast.get("effect"))),
        element("td", _interval(contrast), class_="number", data_value=number(contrast.get("low"))),
        element(
            "td",
            shown(contrast.get("p"), "{:.4f}"),
            class_="number",
            data_value=number(contrast.get("p")),
        ),
        element("td", badge(text(contrast.get("verdict")))),
        element("td", by_model),
    )


def _interval(found: Mapping[str, Any]) -> str:
    low, high = number(found.get("low")), number(found.get("high"))
    if low is None or high is None:
        return ABSENT
    return f"[{shown(low, '{:+.2f}')}, {shown(high, '{:+.2f}')}]"


def _ledger(found: Judged | None, inventory: Inventory, address: Address) -> Markup:
    title = element("h2", "Every claim and number of the paper")
    if found is None:
        command = f"python -m capmoe_eval.claims profile={inventory.profile}"
        absent = element("p", "The ledger is not written yet: ", element("code", command))
        return element("section", title, notice(absent))
    if found.problem:
        return element("section", title, notice(element("p", found.problem)))
    claims = found.claims
    verdicts = {verdict: f"{verdict} ({count})" for verdict, count in found.counts.items()}
    kinds = sorted({text(claim.get("kind")) for claim in claims})
    versions = sorted({text(claim.get("version")) for claim in claims}, reverse=True)
    choices = [
        Filter("verdict", "Verdict", verdicts),
        Filter("kind", "Kind", {kind: kind for kind in kinds}),
        Filter("version", "Version", {version: version for version in versions}),
    ]
    pages = _pages(found, inventory, address)
    headings = (
        Heading("Place"),
        Heading("Claim"),
        Heading("Published", numeric=True),
        Heading("Ours", numeric=True),
        Heading("Verdict"),
    )
    lines = [_claim(claim, pages) for claim in claims]
    caption = f"{len(claims)} claims and numbers, from abstract to appendix."
    files = [
        join(" ", element("a", path.name, href=address.to_file(path)))
        for suffix in ("html", "md", "json")
        if (path := found.path.with_suffix(f".{suffix}")).is_file()
    ]
    return element(
        "section",
        title,
        page.filters(choices),
        page.sortable(caption, headings, [page.rows(lines)]),
        element("p", "The ledger by itself:", files, class_="files"),
    )


def _claim(claim: Mapping[str, Any], pages: Sequence[Markup | None]) -> Markup:
    findings = [mapping(finding) for finding in sequence(claim.get("findings"))]
    published = mapping(claim.get("published"))
    values = [number(value) for value in sequence(published.get("values"))]
    printed = ", ".join(shown(value) for value in values) or ABSENT
    if values and published.get("unit"):
        printed += f" {text(published['unit'])}"
    details = [mapping(d) for f in findings for d in sequence(f.get("details"))]
    first = details[0] if details else {}
    pattern = "{:+.2f} points" if first.get("unit") == "points" else "{:.3g}"
    ours = shown(first.get("effect"), pattern)
    if ours != ABSENT and first.get("unit") not in (None, "", "points"):
        ours += f" {text(first['unit'])}"
    parts: list[Child] = [ours]
    if len(details) > 1:
        parts.append(element("small", f" first of {len(details)}"))
    if _interval(first) != ABSENT:
        parts += [Markup("<br>"), element("small", _interval(first))]
    told = [element("li", _finding(finding, pages)) for finding in findings]
    if claim.get("note"):
        told.append(element("li", f"Note: {text(claim['note'])}"))
    found = element("details", element("summary", "what was found"), element("ul", told))
    scope = claim.get("scope")
    verdict, kind, version = (text(claim.get(key)) for key in ("verdict", "kind", "version"))
    return element(
        "tr",
        element("th", f"{text(claim.get('place'))} ({version})", scope="row"),
        element("td", f"“{text(claim.get('quote'))}”", found if told else None, class_="claim"),
        element("td", printed, class_="number", data_value=values[0] if values else None),
        element("td", parts, class_="number", data_value=number(first.get("effect"))),
        element("td", badge(verdict), element("small", f" {text(scope)}") if scope else None),
        data_verdict=verdict,
        data_kind=kind,
        data_version=version,
    )


def _finding(finding: Mapping[str, Any], pages: Sequence[Markup | None]) -> Child:
    details = [mapping(detail) for detail in sequence(finding.get("details"))]
    places = dict.fromkeys(
        place
        for detail in details
        for place in sequence(detail.get("records"))
        if isinstance(place, int) and 0 <= place < len(pages)
    )
    links = [link for place in places if (link := pages[place]) is not None]
    shown_links = [[", " if i else " Records: ", link] for i, link in enumerate(links[:_LINKS])]
    rest = len(links) - _LINKS
    return [
        element("strong", f"{text(finding.get('source'))}, {text(finding.get('outcome'))}"),
        f": {text(finding.get('text'))}",
        shown_links,
        f" and {rest} more" if rest > 0 else None,
    ]


def _pages(found: Judged, inventory: Inventory, address: Address) -> list[Markup | None]:
    """Return a link to the page of each record that the ledger names."""
    known = {record.path.resolve(): record for record in inventory.records}
    links: list[Markup | None] = []
    for path in sequence(found.content.get("records")):
        record = known.get((found.path.parent / text(path)).resolve())
        links.append(
            None
            if record is None
            else element("a", str(record.cell), href=address.to(page.cell_path(record)))
        )
    return links
