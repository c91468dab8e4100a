"""The subcommand of ``capmoe-eval`` that this package brings."""

from __future__ import annotations

TRAIN = ("Evaluate", "train an embedded model from its recipe", "capmoe_zoo.embedded.command:main")
