"""Name the packages beside the suite, whose settings are known only where they are installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from capmoe_eval.errors import UsageError

BESIDE: Final[Mapping[str, frozenset[str]]] = {
    "capmoe-methods": frozenset(
        {
            *("method=oea", "method=xshare", "method=sere", "method=macs", "method=laser"),
            *("gamma=adaptive", "budget", "budget_of", "placement=eplb"),
            *("k0", "expert_budget", "min_similarity"),
            *("delta", "rho", "modality_threshold", "reroute"),
            *("peak_mass", "viable_score", "load_updates"),
        }
    ),
}
"""What each package brings: values of settings of the suite, and settings of its own."""


def check_installed(setting: str) -> None:
    """Refuse a setting that nothing registers if a package beside the suite brings it.

    Args:
        setting: The name of a setting, or ``name=value``.

    Raises:
        UsageError: With the package to install.
    """
    for package, settings in BESIDE.items():
        if setting in settings:
            raise UsageError(
                f"{setting}: {package} is not installed; pip install {package} (in a checkout, "
                "make install)"
            )
