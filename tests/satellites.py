"""The packages beside the suite, whose methods tests take where they are installed."""

import pytest

from capmoe_eval.__main__ import subcommands
from capmoe_eval.routing.registry import method_names

HAS_METHODS = "oea" in method_names()
NEEDS_METHODS = pytest.mark.skipif(
    not HAS_METHODS, reason="needs packages/capmoe-methods, which make install installs"
)
HAS_ZOO = "train" in subcommands()
HAS_REPORT = "report" in subcommands()
