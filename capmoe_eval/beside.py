"""Name the packages beside the suite, and load what those that are installed bring."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from capmoe_eval.errors import UsageError, first_line

BESIDE: Final[Mapping[str, frozenset[str]]] = {
    "capmoe-methods": frozenset(
        {
            *("method=oea", "method=xshare", "method=sere", "method=macs", "method=laser"),
            *("gamma=adaptive", "budget", "budget_of", "placement=eplb"),
            *("k0", "expert_budget", "min_similarity", "delta", "rho", "reroute"),
            *("modality_threshold", "peak_mass", "viable_score", "load_updates"),
            *("experiment=adaptive", "experiment=comparators", "figure adaptive", "figure decode"),
            *("experiment=images_macs", "experiment=placed", "figure comparators", "figure pareto"),
            *("figure comparators_decode", "figure comparators_ranks", "figure images_position"),
            *("figure images_macs", "figure images_text", "figure companions", "figure waste"),
        }
    ),
    "capmoe-bench": frozenset(
        {
            *("bench", "table table10"),
            *("figure fig4", "figure fig5", "figure fig6", "figure granularity"),
        }
    ),
    "capmoe-report": frozenset({"claims", "export", "replicate", "report"}),
    "capmoe-serve": frozenset(
        {
            *("advise", "loads", "bench placement", "bench server", "backend=vllm"),
            *("save_trace", "trace_tokens"),
        }
    ),
    "capmoe-zoo": frozenset({"train", "model_type=molmo"}),
    "capmoe-benchmarks": frozenset({"bench forward", "bench generate", "bench gpu", "bench suite"}),
}
"""What each package brings: settings, their values, figures, tables, subcommands and benchmarks."""

NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("capmoe-benchmarks", "capmoe-methods", "capmoe-report"), ("capmoe-bench",)),
    "capmoe-serve": ("capmoe-bench", "capmoe-methods", "capmoe-report"),
}
"""The packages that each needs beside it; no index has them, so that pip is given them together."""


def check_installed(setting: str) -> None:
    """Refuse a setting that nothing registers if a package beside the suite brings it.

    Args:
        setting: The name of a setting, ``name=value``, or words of the command line:
            ``figure NAME``, ``table NAME``, ``bench NAME``, or a subcommand.

    Raises:
        UsageError: With the command that installs the package.
    """
    for package, settings in BESIDE.items():
        if setting in settings:
            folders = " ".join(f"./packages/{name}" for name in (package, *NEEDS.get(package, ())))
            folders = folders.replace("packages/capmoe-benchmarks", "benchmarks")
            raise UsageError(
                f"{setting}: {package} is not installed; in a checkout, pip install {folders}, or "
                "make install"
            )


def load_entry_points(group: str) -> dict[str, Any]:
    """Return what the entry points of a group name, by their names in alphabetical order.

    Raises:
        UsageError: If the package of one cannot be imported.
    """
    loaded = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        try:
            loaded[entry.name] = entry.load()
        except Exception as error:  # of a package that may not be ours
            raise UsageError(
                f"{group}: the entry point {entry.name}={entry.value} cannot be loaded "
                f"({first_line(error)}); mend that package, or uninstall it"
            ) from error
    return loaded
