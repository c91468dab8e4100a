"""From plans to an exit status, with what a person should read on the way."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from capmoe_eval.arguments import one_line_errors
from capmoe_eval.configuration import Plan, config_directory, model_notes, options
from capmoe_eval.errors import UnwritableError, UsageError, bad_choice, shown
from capmoe_eval.launched import process_rank
from capmoe_eval.schema import fields


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
    in_order = sorted(plans, key=lambda plan: (plan.note or "", plan.cell.model.name))
    for note in model_notes(in_order):
        print(f"Note: {note}")
    for cell, reason in outcome.failures:
        print(f"failed: {cell}: {reason}", file=sys.stderr)
    return 1 if outcome.failures else 0


class _Stopped(KeyboardInterrupt):
    """A signal that ends the process as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


def run_command(command: Callable[[], int | None]) -> int:
    """Call a command and return its status; turn the mistakes of a user into one line and 2.

    Ctrl-C, SIGTERM and SIGHUP end it alike: what is half written is removed, and the status is 128
    and the signal's number. A question on standard input gets no answer.
    """
    try:
        with _signals(), _no_answers(), one_line_errors():
            status = _status(command)
            sys.stdout.flush()
            return status
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        _discard_output()
        return 0
    except KeyboardInterrupt as error:
        print("interrupted: finished cells are kept, the same command continues", file=sys.stderr)
        return error.status if isinstance(error, _Stopped) else 128 + signal.SIGINT


def run_all(commands: Iterable[Callable[[], int | None]]) -> int:
    """Call commands, and return the highest status.

    A mistake that concerns one of them takes no other with it; an interrupt ends all.
    """
    highest = 0
    for command in commands:
        try:
            highest = max(highest, _status(command, apart=(UnwritableError, BrokenPipeError)))
        except UnwritableError as error:  # nor could the others write theirs
            return _say(str(error))
        except BrokenPipeError:  # nobody reads what is printed, but files are written
            _discard_output()
    return highest


def _status(
    command: Callable[[], int | None], *, apart: tuple[type[Exception], ...] = (BrokenPipeError,)
) -> int:
    """Call a command and return its status; say the mistakes of a user, but for those ``apart``."""
    try:
        return command() or 0
    except apart:
        raise
    except UsageError as error:
        return _say(str(error))
    except MissingConfigException as error:
        return _say(_missing(error))
    except (HydraException, OmegaConfBaseException) as error:
        return _say(_refused(error))
    except EOFError as error:
        return _say(f"a question was asked, and none is answered here: {error}")
    except OSError as error:
        if os.environ.get("CAPMOE_DEBUG"):
            raise
        return _say(f"{shown(error.filename or 'a file')}: {error.strerror or error}")


@contextmanager
def _signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the process as Ctrl-C does, unless they are ignored (nohup)."""

    def stop(number: int, _frame: object) -> None:
        raise _Stopped(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _no_answers() -> Iterator[None]:
    """Let nothing be read from standard input: no library gets a yes that was meant for another."""
    before = sys.stdin
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(mistake: str) -> int:
    """Print a mistake in one line and return the status.

    Where several processes make the same one, rank 0 says it, and torchrun then ends the others;
    what only another rank has to complain of comes a little later.
    """
    if process_rank():
        time.sleep(3)
    print(f"error: {' '.join(mistake.split())}", file=sys.stderr)
    return 2


def _missing(error: MissingConfigException) -> str:
    """Say which option of which group is not there."""
    group, _, option = str(error.missing_cfg_file).rpartition("/")
    known = error.options or options(group)  # Hydra names none for one of several
    if group and known:
        return str(bad_choice(group, option, known))
    return str(error)


def _refused(error: Exception) -> str:
    """Say which override Hydra refused, with a suggestion where the key is close to a known one."""
    told = f"{error} {error.__cause__ or ''}"
    unknown = re.search(r"Key '([^']+)' is not in struct", told)
    if unknown is None:
        word = getattr(error, "override", None)  # that cannot be parsed
        return f"{word}: {error}" if word else str(error)
    section = re.search(r"full_key: (\w+)\.", told)
    if section and fields(section[1]):
        return str(bad_choice(section[1], unknown[1], fields(section[1])))
    known = [str(key) for key in OmegaConf.load(config_directory() / "config.yaml")]
    known = [key for key in known if key not in ("defaults", "hydra")]
    groups = [path.name for path in config_directory().iterdir() if path.is_dir()]
    return str(bad_choice("key", unknown[1], sorted({*known, *groups})))
