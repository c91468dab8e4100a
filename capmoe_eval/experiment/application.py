"""Run commands: whatever goes wrong becomes one line and an exit status.

Ctrl-C, SIGTERM or SIGHUP interrupts a command. A second signal is ignored while the command cleans
up; after :data:`GRACE` seconds it ends the process at once.
"""

import argparse
import importlib.util
import os
import platform
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from capmoe_eval.errors import (
    DISK_ERRORS,
    EnforcementError,
    LeftOutWarning,
    UnwritableError,
    UsageError,
    bad_choice,
    first_line,
    kind_and_place,
    shown,
)
from capmoe_eval.experiment.files import write_text
from capmoe_eval.experiment.processes import of_submitit, process_rank

DEBUG = "CAPMOE_DEBUG"
"""The environment variable with which every error is printed with its traceback."""
INTERRUPTED: Final = (
    "interrupted: finished cells are kept; the same command goes on (overwrite=true: begins anew)"
)
"""The line that a command ends with after Ctrl-C, SIGTERM or SIGHUP."""
GRACE: Final = 3.0
"""Seconds after the first signal in which further signals are ignored."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []  # the signal by which the running command was interrupted


def run_program(main: Callable[[], object]) -> NoReturn:
    """Call the ``main`` of a command as the program of this process, and exit with its status.

    It is :func:`run_command`, also for what happens while libraries are imported and words parsed,
    and while the process ends.
    """

    def command() -> int:
        try:
            status = main()
        except SystemExit as ended:
            status = ended.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            return 1
        return status if isinstance(status, int) else 0

    status = run_command(command)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # libraries that end print no traceback
    sys.exit(status)


def run_command(command: Callable[[], int | None], unexpected: tuple[str, int] = ("", 1)) -> int:
    """Call a command and return its exit status; every error becomes one line.

    The status is 2 for a user's mistake and 1 for an invariant that is broken and for what nobody
    expected, whose traceback is written to a file that the line names.

    Ctrl-C, SIGTERM and SIGHUP all end it in the same way: half-written files are removed, and the
    status is 128 plus the signal's number. Standard input is empty, so that no library gets an
    answer from it.

    Args:
        command: It returns its status, or None for 0.
        unexpected: The words before what nobody expected, and its status.
    """
    with _interrupted_by_signals():
        try:
            with _prepared():
                status = _status(command, unexpected)
                if sys.stdout is not None:  # it was closed when the process began
                    sys.stdout.flush()
                return status
        except BrokenPipeError:  # the reader, such as `head`, has read enough
            _discard_output()
            return 0
        except UnwritableError as error:
            return _say(str(error), error)
        except OSError as error:  # of what was printed
            _discard_output()
            return _say(str(_unwritable_output(error)), error)
        except KeyboardInterrupt:
            return _end_interrupted()


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Make each signal that would end the process interrupt this block.

    Signals that are ignored, as under nohup, stay ignored. A block within a block changes nothing.
    """
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    is_main = threading.current_thread() is threading.main_thread()
    before = {
        number: handler
        for number in _SIGNALS
        if is_main and (handler := signal.getsignal(number)) in defaults
    }
    since = 0.0

    def interrupt(number: int, _frame: object) -> None:
        nonlocal since
        if not _received:
            since = time.monotonic()
            _received.append(number)
            raise KeyboardInterrupt
        if time.monotonic() - since > GRACE:
            os._exit(_end_interrupted())

    try:
        for number in before:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if before:
            _received.clear()


def _end_interrupted() -> int:
    """Print that the command was interrupted, and return its status."""
    with suppress(OSError, RuntimeError):  # RuntimeError: a print was interrupted
        print(INTERRUPTED, file=sys.stderr, flush=True)
    return 128 + (_received[0] if _received else signal.SIGINT)


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """End the process for words that a parser does not take; stands in for ``parser.error``."""
    line = " ".join(message.removeprefix("argument ").replace(": =", "=", 1).split())
    if parser.prog == "capmoe-eval" and line.startswith("unrecognized arguments: --"):
        line += "; write a setting as KEY=VALUE, such as gamma=1.0"
    parser.exit(2, f"error: {line}; {parser.prog} --help says what there is\n")


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


def _status(command: Callable[[], int | None], unexpected: tuple[str, int] = ("", 1)) -> int:
    """Call a command and return its status; print its error unless that ends all commands."""
    try:
        return command() or 0
    except (BrokenPipeError, UnwritableError):
        raise
    except Exception as error:
        if _received:  # a library, such as one that is just imported, made an error of it
            raise KeyboardInterrupt from error
        if of_submitit(error):  # it tells its launcher that the job has ended
            raise
        if isinstance(error, OSError) and not error.filename and error.errno in DISK_ERRORS:
            raise _unwritable_output(error) from error
        if (mistake := _mistake(error)) is not None:
            return _say(mistake, error)
        if isinstance(error, EnforcementError):
            return _say(str(error), error, 1)
        words, status = unexpected
        status = 2 if isinstance(error, OSError) else status  # of the machine, not of the suite
        line = f"{words}{kind_and_place(error)}; {_written(error)}"
        return _say(line, error, status)


def _mistake(error: Exception) -> str | None:
    """Return the line of a user's mistake; None if an error is none."""
    if isinstance(error, UsageError):
        return str(error)
    if isinstance(error, EOFError):
        return f"a question was asked, and none is answered here: {error}"
    if type(error).__module__.startswith("yaml."):  # the message names the file
        return f"not valid YAML: {error}"
    # A missing option is an error of files, too.
    if (line := _hydra_line(error)) is not None:
        return line
    name = str(getattr(error, "name", None)).partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and name and not importlib.util.find_spec(name):
        projects = {"PIL": "pillow", "yaml": "pyyaml", "hydra": "hydra-core"}
        return f"{name}: is not installed; pip install {projects.get(name, name.replace('_', '-'))}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{shown(error.filename)}: {error.strerror or error}"
    return None


def _written(error: Exception) -> str:
    """Write the traceback of an error nobody expected to a file; return where it is, in words."""
    if os.environ.get(DEBUG):
        return "the traceback is above"
    version = sys.modules["capmoe_eval"].__version__
    about = f"capmoe_eval {version}, Python {platform.python_version()}, {platform.platform()}\n"
    about += f"words: {sys.argv}\n" + "".join(traceback.format_exception(error))
    try:
        name = f"capmoe_eval-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}.txt"
        path = Path(tempfile.gettempdir()) / name
        write_text(path, about)
    except Exception as second:  # a full disk must not hide the first error
        return f"its traceback cannot be written ({first_line(second)}); {DEBUG}=1 prints it"
    return f"the traceback is in {path}; {DEBUG}=1 prints it"


@contextmanager
def _prepared() -> Iterator[None]:
    """Make standard input empty, and have warnings and parsers of libraries say one line."""
    stdin, error, show = sys.stdin, argparse.ArgumentParser.error, warnings.showwarning

    def show_line(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if issubclass(category, LeftOutWarning):
            print(message, file=sys.stderr)
        else:
            show(message, category, *where)

    with Path(os.devnull).open() as nothing:
        sys.stdin = nothing
        warnings.showwarning = show_line  # type: ignore[assignment]
        argparse.ArgumentParser.error = refuse  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            sys.stdin, warnings.showwarning = stdin, show
            argparse.ArgumentParser.error = error  # type: ignore[method-assign]


def _unwritable_output(error: OSError) -> UnwritableError:
    return UnwritableError(
        f"standard output, or a file: cannot be written ({error.strerror}); free some space there"
    )


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(line: str, error: Exception, status: int = 2) -> int:
    """Print an error in one line and return the status.

    Of several processes with the same mistake only rank 0 prints it, because torchrun then ends the
    others; a mistake of another rank alone is printed a few seconds later.
    """
    if process_rank():
        time.sleep(3)
    with suppress(OSError):  # nobody reads it
        if os.environ.get(DEBUG):
            traceback.print_exception(error)
        print(f"error: {' '.join(line.split())}", file=sys.stderr)
    return status


def _hydra_line(error: Exception) -> str | None:
    """Return the error line for an exception of Hydra; None for any other."""
    if "hydra" not in sys.modules:  # a machine with torch alone, for a benchmark, lacks it
        return None
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    from capmoe_eval.beside import check_installed
    from capmoe_eval.experiment.composition import options

    if isinstance(error, MissingConfigException):
        missing = str(error.missing_cfg_file)
        group, _, option = missing.partition("/")
        if group == "hydra":
            group, _, option = missing.rpartition("/")
        launcher = option.partition("_")[0]
        if group == "hydra/launcher" and launcher in _LAUNCHERS:
            return (
                f"{group}={option}: needs hydra-{launcher}-launcher, which is not installed; "
                f"pip install {_LAUNCHERS[launcher]}"
            )
        choices = error.options or options(group)  # Hydra gives no options for one of several
        if not group or not choices:
            return str(error)
        try:
            check_installed(f"{group}={option}")
        except UsageError as mistake:
            return str(mistake)
        return f"{bad_choice(group, option, choices)}{_OTHERS.get(group, '')}"
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return _refused(error)
    return None


_LAUNCHERS: Final = {
    "joblib": "'capmoe-eval[joblib]'",
    "ray": "hydra-ray-launcher",
    "rq": "hydra-rq-launcher",
    "submitit": "'capmoe-eval[slurm]'",
}
"""The words after ``pip install`` for Hydra's launchers."""
_OTHERS: Final = {
    "model": "; for a checkpoint: model=custom model.name=NAME model.pretrained=PATH",
    "tasks": "; tasks=FILE.yaml is a task of your own, and capmoe-eval lm-eval has lm-eval's",
}


def _refused(error: Exception) -> str:
    """Return the error line for an override that Hydra refused."""
    from capmoe_eval.experiment.settings import LISTS

    several = re.search(r"Ambiguous value for argument '([^=']+)=([^']*)'", str(error))
    if several:
        key, values = several.groups()
        a_list = f"write {key}=[{shown(values)}] for a list, or " if key in LISTS else ""
        return (
            f"{shown(f'{key}={values}')}: is several values; {a_list}evaluate each by "
            f"capmoe-eval sweep {key}={shown(values)}"
        )
    if "missing EQUAL" in f"{error} {error.__cause__ or ''}":
        word = shown(getattr(error, "override", ""))
        return f"{word}: is no setting; write KEY=VALUE without spaces"
    return str(error)
