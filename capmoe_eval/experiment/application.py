"""Run commands: errors become one line and an exit status."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Final

import yaml

from capmoe_eval.errors import UnwritableError, UsageError, bad_choice, first_line, shown
from capmoe_eval.experiment.arguments import one_line_errors
from capmoe_eval.experiment.processes import process_rank
from capmoe_eval.experiment.schema import fields

INTERRUPTED: Final = "interrupted: finished cells are kept, the same command continues"
"""The line that a command ends with after Ctrl-C, SIGTERM or SIGHUP."""


def run_command(command: Callable[[], int | None]) -> int:
    """Call a command and return its exit status; a user's mistake gives one line and status 2.

    Ctrl-C, SIGTERM and SIGHUP all end it in the same way: half-written files are removed, and the
    status is 128 plus the signal's number. Standard input is empty, so that no library gets an
    answer from it.
    """
    try:
        with _no_input(), _signals(), one_line_errors():
            status = _status(command)
            sys.stdout.flush()
            return status
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        _discard_output()
        return 0
    except UnwritableError as error:
        return _say(str(error))
    except KeyboardInterrupt as error:
        print(INTERRUPTED, file=sys.stderr)
        return 128 + (error.args[0] if error.args else signal.SIGINT)


def run_all(commands: Iterable[Callable[[], int | None]]) -> int:
    """Call commands one after the other, and return the highest status.

    A mistake in one does not stop the others; an interrupt does, and an UnwritableError, since the
    others could not write their files either.
    """
    highest = 0
    for command in commands:
        try:
            highest = max(highest, _status(command))
        except BrokenPipeError:  # nobody reads the output, but the files are still to be written
            _discard_output()
    return highest


def _status(command: Callable[[], int | None]) -> int:
    """Call a command and return its status; print a user's mistake unless it ends all commands."""
    try:
        with _not_hidden():
            return command() or 0
    except (BrokenPipeError, UnwritableError):
        raise
    except UsageError as error:
        return _say(str(error))
    except yaml.YAMLError as error:  # the message names the file
        return _say(f"not valid YAML: {error}")
    except EOFError as error:
        return _say(f"a question was asked, and none is answered here: {error}")
    except Exception as error:
        # A missing option is an error of files, too.
        if (line := _hydra_line(error) or _absent_package(error)) is not None:
            return _say(line)
        if not isinstance(error, OSError) or os.environ.get("CAPMOE_DEBUG"):
            raise
        return _say(f"{shown(error.filename or 'a file')}: {error.strerror or error}")


@contextmanager
def _no_input() -> Iterator[None]:
    """Make standard input empty."""
    before = sys.stdin
    with Path(os.devnull).open() as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before


@contextmanager
def _signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the process as Ctrl-C does, unless they are ignored (nohup)."""

    def stop(number: int, _frame: object) -> None:
        _came.append(number)
        raise KeyboardInterrupt(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if before:
            _came.clear()


_came: Final[list[int]] = []
"""The signals that came to the running command."""


@contextmanager
def _not_hidden() -> Iterator[None]:
    """Interrupt again where a library, such as one that is just imported, made an error of it."""
    try:
        yield
    except Exception as error:
        if _came:
            raise KeyboardInterrupt(_came[-1]) from error
        raise


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(mistake: str) -> int:
    """Print a mistake in one line and return the status.

    Of several processes with the same mistake only rank 0 prints it, because torchrun then ends the
    others; a mistake of another rank alone is printed a few seconds later.
    """
    if process_rank():
        time.sleep(3)
    print(f"error: {' '.join(mistake.split())}", file=sys.stderr)
    return 2


def _hydra_line(error: Exception) -> str | None:
    """Return the error line for an exception of Hydra; None for any other."""
    if "hydra" not in sys.modules:  # a machine with torch alone, for a benchmark, lacks it
        return None
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    from capmoe_eval.experiment.configuration import options

    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if group == "hydra/launcher" and option.startswith("submitit_"):
            return (
                f"{group}={option}: needs hydra-submitit-launcher, which is not installed; "
                "pip install 'capmoe-eval[slurm]'"
            )
        known = error.options or options(group)  # Hydra gives no options for one of several
        return str(bad_choice(group, option, known) if group and known else error)
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return _refused(error)
    if isinstance(error, (TypeError, ValueError)) and _raised_in(error) in ("hydra", "omegaconf"):
        return f"{shown(_unreadable_word())}: {first_line(error)}; --help says what there is"
    return None


def _raised_in(error: Exception) -> str:
    """Return the name of the top-level package whose code raised an exception."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).partition(".")[0] if frames else ""


def _unreadable_word() -> str:
    """Return the word of the command line that Hydra cannot compose; all of them if unknown."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from capmoe_eval.experiment.configuration import options

    words = [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
    for word in words:
        try:
            parsed = OverridesParser.create().parse_override(word)
        except Exception:
            return word
        chosen = parsed.value()
        names = chosen if isinstance(chosen, list) else [chosen]
        of_group = parsed.package is not None or options(parsed.key_or_group)
        if of_group and not all(isinstance(name, str) for name in names):
            return word
    return " ".join(sys.argv[1:])


def _absent_package(error: Exception) -> str | None:
    """Return the error line for a package of others that is not installed; None for the rest."""
    name = str(getattr(error, "name", None)).partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or name in (__package__.partition(".")[0], ""):
        return None
    project = _PROJECTS.get(name, name.replace("_", "-"))
    try:
        wanted = metadata.requires("capmoe-eval") or []
    except metadata.PackageNotFoundError:
        wanted = []
    version = next((w for w in wanted if re.match(rf"{re.escape(project)}(?![\w.-])", w)), project)
    return f"{name}: is not installed; pip install {shlex.quote(version.partition(';')[0].strip())}"


_PROJECTS: Final = {"PIL": "pillow", "yaml": "pyyaml", "hydra": "hydra-core"}
"""Names of projects on PyPI by their packages, where the two differ in more than underscores."""


def _refused(error: Exception) -> str:
    """Return the error line for an override that Hydra refused, with the closest known key."""
    from omegaconf import OmegaConf

    from capmoe_eval.experiment.configuration import config_directory

    told = f"{error} {error.__cause__ or ''}"
    unknown = re.search(r"Key '([^']+)' is not in struct", told)
    if unknown is None:
        word = getattr(error, "override", None)  # an override that cannot be parsed
        return f"{word}: {error}" if word else str(error)
    section = re.search(r"full_key: (\w+)\.", told)
    if section and fields(section[1]):
        return str(bad_choice(section[1], unknown[1], fields(section[1])))
    keys = {str(key) for key in OmegaConf.load(config_directory() / "config.yaml")}
    groups = {path.name for path in config_directory().iterdir() if path.is_dir()}
    return str(bad_choice("key", unknown[1], sorted(keys - {"defaults", "hydra"} | groups)))
