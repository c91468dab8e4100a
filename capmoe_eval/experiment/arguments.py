"""Options of the commands: a parser that refuses in one line, checked types."""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, get_args

from pydantic import Field

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.application import refuse
from capmoe_eval.experiment.cell import Threads
from capmoe_eval.experiment.names import BENCHMARKS
from capmoe_eval.routing.capacity import PLAIN
from capmoe_eval.routing.knobs import LARGEST, Count, check


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, with status 2, also ``out=DIR`` where --out is meant."""

    error = refuse

    def _get_formatter(self) -> argparse.HelpFormatter:
        for action in self._actions:
            _describe(action)
        return super()._get_formatter()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; every other way to parse ends here."""
        parsed, others = super().parse_known_args(args, namespace)
        for word in getattr(parsed, "overrides", None) or ():
            option = f"--{word.partition('=')[0]}"
            if "=" in word and option in self._option_string_actions:
                self.error(f"{shown(word)}: is an option; write {shown('--' + word)}")
            if re.match(r"[+~]*experiment=", word):
                self.error(f"{word}: what is reported says which experiment it is of; leave it out")
            if word.lower() == "plan=true" and not getattr(parsed, "missing", False):
                self.error(f"{word}: plans a run, and this command computes nothing; leave it out")
        return parsed, others

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; ``--config-dir`` becomes the override that Hydra has for it."""
        parsed = super().parse_intermixed_args(args, namespace)
        if folder := getattr(parsed, "config_dir", None):
            parsed.overrides.append(f"hydra.searchpath=[file://{folder.resolve()}]")
        return parsed


def report_options(
    parser: Parser,
    overrides: str = "as for capmoe-eval run, e.g. profile=paper limit=100",
    *,
    has_bench: bool = True,
) -> None:
    """Declare the options of every command that reports on results, and on benchmarks."""
    parser.add_argument(
        "--out",
        type=PATH,
        default=Path("reports"),
        help="directory of what is written (default: reports)",
    )
    if has_bench:
        parser.add_argument(
            "--bench",
            type=FOLDER,
            default=BENCHMARKS,
            help="directory of the benchmarks' files (default: %(default)s)",
        )
    parser.add_argument("--config-dir", type=FOLDER, help="directory of more files as in conf/")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=overrides)


def _path(word: str) -> Path:
    if not word.strip() or not word.isprintable():
        raise argparse.ArgumentTypeError(f"={shown(word)}: must be a path")
    return Path(word)


def _folder(word: str) -> Path:
    if not (path := _path(word)).is_dir():
        rule = "no such directory; name another, or leave the option out"
        raise argparse.ArgumentTypeError(f"={shown(word)}: {rule}")
    return path


def _typed(annotation: Any) -> Callable[[str], Any]:
    """Return the type of an option: the number of a word, as an annotation allows it."""
    parse = get_args(annotation)[0]

    def convert(word: str) -> Any:
        try:
            value = parse(word) if PLAIN.fullmatch(word) else word
        except ValueError:
            value = word
        try:
            return check("", value, annotation)
        except UsageError as error:
            rule = str(error).removeprefix(f"={shown(value)}: ")
            raise argparse.ArgumentTypeError(f"={shown(word)}: {rule}") from error

    return convert


COUNT = _typed(Count)
# Those of a layer, and what there are at most as many of.
EXPERTS = _typed(Annotated[int, Field(ge=1, le=2**12)])
TOKENS = _typed(Annotated[int, Field(ge=1, le=2**40)])
INDEX = _typed(Annotated[int, Field(ge=0, le=LARGEST)])
THREADS = _typed(Threads)
POSITIVE = _typed(Annotated[float, Field(gt=0)])
SECONDS = _typed(Annotated[float, Field(ge=0)])  # of the benchmarks' options.yaml, by its name
POINTS = _typed(Annotated[float, Field(ge=0, le=100)])
PATH = _path
FOLDER = _folder
_METAVARS: Final[Mapping[object, str]] = {
    **dict.fromkeys((COUNT, EXPERTS, TOKENS, INDEX, THREADS), "N"),
    **dict.fromkeys((POSITIVE, SECONDS, POINTS), "X"),
    **{PATH: "PATH", FOLDER: "PATH"},
}


def _describe(action: argparse.Action) -> None:
    """Name the value of an option by its type in the help, and add its default."""
    if action.nargs == 0 or not action.option_strings:
        return
    if action.metavar is None and action.choices is None:
        action.metavar = _METAVARS.get(action.type)
    default = action.default
    if default is not None and "(default: " not in (action.help or ""):
        values = default if isinstance(default, (list, tuple)) else [default]
        text = " ".join(map(str, values)).replace("%", "%%")
        action.help = f"{action.help or ''} (default: {text})".strip()
