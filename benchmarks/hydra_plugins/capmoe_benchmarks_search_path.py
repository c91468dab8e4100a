"""Hydra's plugin that finds the experiment of ``capmoe-eval bench rehearsal``."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class BenchmarksSearchPath(SearchPathPlugin):
    """Add the experiment of the rehearsal to ``experiment=``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the package's ``conf/``, after the suite's own."""
        search_path.append("capmoe-benchmarks", "pkg://capmoe_benchmarks.conf")
