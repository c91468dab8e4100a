"""Hooks of MkDocs: pages of the repository that lie outside of ``docs/``.

The READMEs of the methods of other papers are pages of the site. A link to another file of the
repository, which a reader of the site may not have, becomes its name. Nothing is loaded from a
network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
METHODS = "packages/capmoe-methods/capmoe_methods/{}/README.md"
# The theme loads it for the search of a page from the disk; ``docs/site/worker.js`` stands in.
_SHIM = re.compile(r'<script src="https://unpkg\.com/[^"]*"></script>')
_ROLE = re.compile(r":(?:meth|func|class|attr|data|mod):(?=<code>)")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"(?m)^<!-- .*make pages -->\n|^<!-- end of .* -->\n")


def on_files(files: Files, config: Any) -> Files:
    """Add the README of every method of another paper."""
    for path in sorted(ROOT.glob(METHODS.format("*"))):
        source = page_of(path.relative_to(ROOT).as_posix())
        text = path.read_text(encoding="utf-8")
        files.append(File.generated(config, source, content=text))
    return files


def page_of(path: str) -> str:
    """Return the page of a file of the repository, or nothing."""
    parts = PurePosixPath(path).parts
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    is_method = len(parts) == 5 and path == METHODS.format(parts[3])
    return f"methods/{parts[3]}.md" if is_method else ""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to the site's pages, and find verdicts and log, which have all words, last."""
    source = page.file.src_uri
    if source.startswith(("zoo/", "log/")):
        page.meta["search"] = {"boost": 0.01}
    is_method = source.startswith("methods/")
    home = METHODS.format(PurePosixPath(source).stem) if is_method else f"docs/{source}"

    def linked(link: re.Match[str]) -> str:
        text, target = link.groups()
        file, mark, anchor = target.partition("#")
        if "://" in target or not file:
            return link[0]
        path = os.path.normpath(PurePosixPath(home).parent / file).replace(os.sep, "/")
        if not (ROOT / path).exists():
            return link[0]
        there = page_of(path)
        if not there or there.endswith(".schema.json"):
            return text if text.startswith("`") else f"{text} (`{path}`)"
        return f"[{text}]({os.path.relpath(there, PurePosixPath(source).parent)}{mark}{anchor})"

    return _LINK.sub(linked, _BLOCK.sub("", markdown))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Leave out the roles of docstrings, and lead to the report of results."""
    if page.file.src_uri == "index.md":
        html += '<p><a href="../index.html">Open the report</a>, if it is built.</p>'
    return _ROLE.sub("", html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Put the site's own script in the place of one from a network."""
    top = "../" * page.file.dest_uri.count("/")
    return _SHIM.sub(f'<script src="{top}site/worker.js"></script>', output)


def on_post_template(output_content: str, **_: Any) -> str:
    """Do so in the page of a missing page."""
    return _SHIM.sub("", output_content)
