"""Write ``docs/reference/bill_of_materials.md``: ``python -m tests.bill_of_materials``.

A part is listed with the licence and origin that stand here, and with the hash of its files.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "reference" / "bill_of_materials.md"
OWN = {
    ".py",
    ".yaml",
    ".html",
    ".css",
    ".js",
    ".j2",
    ".md",
    ".tex",
    ".mplstyle",
    ".typed",
    ".xml",
    "",
}
"""Endings of what is written by hand: code, configuration, word lists, templates."""
INTRODUCTION = """\
# Bill of materials

Written by `python -m tests.bill_of_materials`. The wheel carries code, configuration, word lists
and templates of this project (Apache-2.0), in which `capmoe_eval/paper/claims/` quotes sentences
of the paper, and the parts below. The libraries that it needs are declared in `pyproject.toml`.
SHA-256 is that of the lines `<SHA-256 of a file> <path>`, sorted by path, as `sha256sum` writes
them.

| part | files | bytes | SPDX | origin | SHA-256 |
|---|---:|---:|---|---|---|"""
_PACKAGED = ("capmoe_eval", "hydra_plugins", "conf")
_WEIGHTS = "capmoe_eval/zoo/weights"


@dataclass(frozen=True)
class Part:
    """Files of one origin."""

    files: str  # a pattern of paths
    title: str
    licence: str  # an SPDX expression
    origin: str


PARTS = (
    Part(
        f"{_WEIGHTS}/llava_olmoe/*",
        "Weights and tokenizer of `llava_olmoe`",
        "Apache-2.0",
        "trained by this project on pictures that it draws",
    ),
    *(
        Part(
            f"{_WEIGHTS}/{name}/*",
            f"Weights of `{name}`",
            "Apache-2.0",
            "trained by this project on the mini-world's corpus",
        )
        for name in ("olmoe", "qwen2_moe", "deepseek_v2", "mixtral")
    ),
    *(
        Part(f"{_WEIGHTS}/{pattern}", title, "Apache-2.0", "measured by this project")
        for pattern, title in (
            ("*_s[0-9]/card.json", "Cards of further training seeds, without their weights"),
            ("banking77/card.json", "Card of `banking77`, without its weights"),
            ("icl_olmoe/card.json", "Card of `icl_olmoe`, without its weights"),
            ("qwen3_moe/*", "Card of `qwen3_moe`, without its weights"),
            ("olmoe_large/*", "Card of `olmoe_large`, without its weights"),
        )
    ),
    Part(
        "capmoe_eval/zoo/miniworld/tokenizer.json",
        "Tokenizer of the mini-world",
        "Apache-2.0",
        "trained by this project on the mini-world's corpus",
    ),
    Part(
        "capmoe_eval/zoo/real_text/*",
        "BANKING77, train and test split",
        "CC-BY-4.0",
        "by PolyAI; Casanueva et al., Efficient Intent Detection with Dual Sentence Encoders, 2020 "
        "(arXiv 2003.04807); unchanged but for the file format",
    ),
    Part(
        "capmoe_eval/serving/data/example.npz",
        "Routing of `olmoe` on questions of the mini-world",
        "Apache-2.0",
        "recorded by this project",
    ),
    Part(
        "capmoe_eval/server/dashboard.json",
        "Dashboard for Grafana",
        "Apache-2.0",
        "written by this project",
    ),
    Part(
        "capmoe_eval/paper/data/*.[cj]s*",
        "Numbers that the paper prints or draws",
        "NOASSERTION",
        "read from He et al., Capacity-Aware Inference (arXiv 2503.05066), to compare with",
    ),
)


def main() -> None:
    """Write the document."""
    DOCUMENT.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the document."""
    return "\n".join(_lines()) + "\n"


def packaged() -> list[str]:
    """Return the paths of the files that go into the wheel."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--", *_PACKAGED],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def part_of(path: str) -> Part | None:
    """Return the part that a file belongs to; None for what is written by hand."""
    return next((part for part in PARTS if fnmatchcase(path, part.files)), None)


def unlisted() -> list[str]:
    """Return the files of the wheel that are neither written by hand nor listed."""
    paths = (path for path in packaged() if part_of(path) is None)
    return [path for path in paths if PurePosixPath(path).suffix not in OWN]


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    files = packaged()
    for part in PARTS:
        own = [path for path in files if part_of(path) is part]
        size = sum((ROOT / path).stat().st_size for path in own)
        yield (
            f"| {part.title}: `{part.files}` | {len(own)} | {size:,} | {part.licence} | "
            f"{part.origin} | `{_hash(own)}` |"
        )


def _hash(paths: Iterable[str]) -> str:
    lines = (
        f"{hashlib.sha256((ROOT / path).read_bytes()).hexdigest()}  {path}\n"
        for path in sorted(paths)
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


if __name__ == "__main__":
    main()
