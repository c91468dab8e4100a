"""From plans to an exit status, with what a person should read on the way."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence

from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from capmoe_eval.configuration import Plan, config_directory, options
from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.launched import process_rank


def execute(plans: Sequence[Plan]) -> int:
    """Compute the plans, print the results, and return the exit status.

    Returns:
        0 if every cell is finished, 1 if some failed.

    Raises:
        UsageError: For a mistake that concerns all that was asked for.
    """
    # lm-eval's bars would tear our own display; tqdm reads this when it is first imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from capmoe_eval.run import run
    from capmoe_eval.summary import summary

    outcome = run(plans)
    if process_rank() and any(plan.parallel == "ep" for plan in plans):
        return 1 if outcome.failures else 0  # rank 0 says it
    if outcome.records:
        print(summary(outcome.records))
        skipped = len(outcome.records) - outcome.computed
        failed = len(outcome.failures)
        print(f"{outcome.computed} computed, {skipped} finished before, {failed} failed")
    for note in sorted({plan.note for plan in plans if plan.note}):
        models = sorted({plan.cell.model.name for plan in plans if plan.note == note})
        print(f"Note: {', '.join(models)}: {note}.")
    for cell, reason in outcome.failures:
        print(f"failed: {cell}: {reason}", file=sys.stderr)
    return 1 if outcome.failures else 0


def run_command(command: Callable[[], int | None]) -> int:
    """Call a command and return its status; turn the mistakes of a user into one line and 2."""
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as error:
        return _say(str(error))
    except MissingConfigException as error:
        return _say(_missing(error))
    except (HydraException, OmegaConfBaseException) as error:
        return _say(_refused(error))
    except KeyboardInterrupt:
        print("interrupted: finished cells are kept, the same command continues", file=sys.stderr)
        return 130


def _say(mistake: str) -> int:
    """Print a mistake in one line and return the status.

    Where several processes make the same one, rank 0 says it, and torchrun then ends the others;
    what only another rank has to complain of comes a little later.
    """
    if process_rank():
        time.sleep(3)
    print(f"error: {mistake}", file=sys.stderr)
    return 2


def _missing(error: MissingConfigException) -> str:
    """Say which option of which group is not there."""
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    known = error.options or options(group)  # Hydra names none for one of several
    if group and known:
        return str(bad_choice(group, option, known))
    return _one_line(error)


def _refused(error: Exception) -> str:
    """Say which override Hydra refused, with a suggestion where the key is close to a known one."""
    unknown = re.search(r"Key '([^']+)' is not in struct", f"{error} {error.__cause__ or ''}")
    if unknown:
        known = [str(key) for key in OmegaConf.load(config_directory() / "config.yaml")]
        known = [key for key in known if key not in ("defaults", "hydra")]
        groups = [path.name for path in config_directory().iterdir() if path.is_dir()]
        return str(bad_choice("key", unknown.group(1), sorted({*known, *groups})))
    return _one_line(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
