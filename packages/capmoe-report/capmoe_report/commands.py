"""The subcommands that ``capmoe-eval`` has where this package is installed."""

from typing import Final

_TITLE: Final = "Report on finished results"

CLAIMS: Final = (
    _TITLE,
    "list every claim of the paper with its verdict",
    "capmoe_report.claims:main",
)
EXPORT: Final = (
    _TITLE,
    "write records for other tools: files of lm-eval, Parquet",
    "capmoe_report.export:main",
)
REPLICATE: Final = (
    _TITLE,
    "test the claims on every model, with effects and intervals",
    "capmoe_report.replicate:main",
)
REPORT: Final = (_TITLE, "build a static site of all results", "capmoe_report.report:main")
