"""Refuse the words of a command in one line, with status 2."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """End the process for words that a parser does not take; stands in for ``parser.error``."""
    line = " ".join(message.removeprefix("argument ").replace(": =", "=", 1).split())
    parser.exit(2, f"error: {line}; {parser.prog} --help says what there is\n")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Have the parsers of libraries (Hydra, lm-eval) refuse in one line, too."""
    before = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = refuse  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        argparse.ArgumentParser.error = before  # type: ignore[method-assign]
