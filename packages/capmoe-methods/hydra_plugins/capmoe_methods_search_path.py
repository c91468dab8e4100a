"""Hydra's plugin that finds the experiments of the package ``capmoe_methods``."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class MethodsSearchPath(SearchPathPlugin):
    """Add the experiments of methods of other papers to ``experiment=``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the package's ``conf/``, after the suite's own."""
        search_path.append("capmoe-methods", "pkg://capmoe_methods.conf")
