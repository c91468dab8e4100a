"""The subcommands that ``capmoe-eval`` has where this package is installed."""

from __future__ import annotations

from typing import Final

from capmoe_eval.beside import Subcommand

_TITLE: Final = "Report on finished results"

CLAIMS: Final = Subcommand(
    _TITLE, "list every claim of the paper with its verdict", "capmoe_report.claims:main"
)
REPLICATE: Final = Subcommand(
    _TITLE,
    "test the claims on every model, with effects and intervals",
    "capmoe_report.replicate:main",
)
REPORT: Final = Subcommand(
    _TITLE, "build a static site of all results", "capmoe_report.report:main"
)
