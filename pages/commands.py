"""Blocks of what the suite says of itself: the output of commands, and the table of knobs."""

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from capmoe_report.records import file_with

from capmoe_eval.errors import shown
from capmoe_eval.routing.registry import knobs, methods_in_words
from pages import ROOT, paragraph, table


def first_result(command: str) -> str:
    """Return what a command prints, below it the files that have the records."""
    text = printed(command, is_shown=True)
    files = {Path(name).stem: file_with(ROOT / name) for name in re.findall(r"results/\S+", text)}
    links = [
        f"`{name}` in [{file.parent.name}/{file.name}]({file.relative_to(ROOT).as_posix()})"
        for name, file in files.items()
    ]
    return text + paragraph(f"The records are packed: {', '.join(links)}.")


def printed(command: str, *, is_shown: bool = False, paragraphs: slice = slice(None)) -> str:
    """Return what a command prints, indented, without the lines on files that it wrote.

    ``is_shown`` puts the command above it; "…" stands where the paragraphs are not the last.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in ("results", "capmoe_eval"):
            (Path(folder) / name).symlink_to(ROOT / name)
        words = [sys.executable, "-m", "capmoe_eval", *shlex.split(command)[1:]]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("written")]
    parts = "\n".join(lines).strip("\n").split("\n\n")
    ending = [] if parts[paragraphs][-1:] == parts[-1:] else ["…"]
    lines = "\n\n".join([*parts[paragraphs], *ending]).splitlines()
    lines = [f"$ {command}", *lines] if is_shown else lines
    text = "\n".join(f"    {line}".rstrip() for line in lines).strip("\n")
    return f"\n{text}\n\n"


def knob_table() -> str:
    """Return every knob of every registered method as a row of a Markdown table."""
    with_gamma = methods_in_words("layer_gammas")
    rows = []
    for knob in knobs().values():
        names = ", ".join(f"`{name}`" for name in knob.choices)
        cells = f"`{knob.name}`", f"`{shown(knob.default)}`", names or knob.values, knob.help
        rows.append((*cells, methods_in_words(knob.name).replace(with_gamma, "with γ")))
    head = ("knob", "default", "values", "meaning", "methods")
    return table(head, rows) + "\n" + paragraph(f"Methods with γ are {with_gamma}.")
