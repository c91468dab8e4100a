"""The subcommands that ``capmoe-eval`` has where this package is installed."""

from typing import Final

ADVISE: Final = (
    "Serve",
    "recommend a capacity for a deployment, or none",
    "capmoe_serve.advise:main",
)
LOADS: Final = (
    "Serve",
    "summarise the expert loads of a server's trace",
    "capmoe_serve.loads:main",
)
