"""``capmoe-eval completion bash``: a script that has a shell complete the words of the command."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pkgutil import resolve_name
from typing import Any, Final, Literal, get_args, get_origin

from capmoe_eval.__main__ import subcommands
from capmoe_eval.experiment.arguments import Parser
from capmoe_eval.experiment.composition import config_directory, options
from capmoe_eval.experiment.settings import keys
from capmoe_eval.paper.layout import TABLES
from capmoe_eval.report.figures.catalogue import figures
from capmoe_eval.routing.registry import method_names

_EVALUATION: Final = ("-m", "--cfg", "--help", "--version")
_NAMES: Final[Mapping[str, Callable[[], Iterable[str]]]] = {
    "table": lambda: (*(layout.key for layout in TABLES), "all"),
    "figure": lambda: (*figures(), "all"),
    "completion": lambda: _SCRIPTS,
}
_BASH: Final = """\
_capmoe_eval() {{
  local line="${{COMP_LINE:0:COMP_POINT}}" words
  local word="${{line##*[ =]}}" current="${{line##* }}"
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="{run}" ;;
  esac
  [ "$COMP_CWORD" -gt 1 ] || words="{subcommands} $words"
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [[ "${{COMPREPLY[0]}}" != *= ]] || compopt -o nospace 2> /dev/null
  [[ "$current" != *=* ]] || COMPREPLY=("${{COMPREPLY[@]#"${{current%"$word"}}"}}")
}}
complete -o default -F _capmoe_eval capmoe-eval"""


def main(words: Sequence[str]) -> None:
    """Print the script of a shell."""
    parser = Parser(
        prog="capmoe-eval completion",
        description="Print a script that completes subcommands, options, keys and their choices.",
        epilog="Keep it in a file that the shell reads: capmoe-eval completion bash > "
        "~/.local/share/bash-completion/completions/capmoe-eval",
    )
    parser.add_argument("shell", choices=_SCRIPTS)
    print(_SCRIPTS[parser.parse_args(words).shell]())


def subcommand_words(name: str) -> list[str]:
    """Return the words that may follow a subcommand; ``key=`` stands where any value may."""
    if name in ("run", "sweep"):
        return [*_EVALUATION, *overrides()]
    each, usage = subcommands()[name], io.StringIO()
    if name != "lm-eval":  # slow to import
        with redirect_stdout(usage), suppress(SystemExit):
            resolve_name(each.function)(["--help"])
    listed = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", usage.getvalue())))
    return [
        *_NAMES.get(name, each.names)(),
        *listed,
        *(overrides() if "KEY=VALUE" in usage.getvalue() else ()),
    ]


def overrides() -> list[str]:
    """Return ``key=choice`` of each key of the configuration that has choices, and ``key=``."""
    groups = (path.name for path in config_directory().iterdir() if path.is_dir())
    choices = {key: _choices(annotation) for key, annotation in keys().items()}
    choices |= {group: options(group) for group in groups if group != "hydra"}
    choices["method"] = list(method_names())
    return [f"{key}={choice}" for key, each in choices.items() for choice in each or [""]]


def _choices(annotation: Any) -> list[str]:
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _bash() -> str:
    lines = [
        f'    {name}) words="{" ".join(subcommand_words(name))}" ;;'
        for name in subcommands()
        if name not in ("run", "sweep")
    ]
    return _BASH.format(
        cases="\n".join(lines),
        run=" ".join(subcommand_words("run")),
        subcommands=" ".join(subcommands()),
    )


def _fish() -> str:
    lines = ["complete -c capmoe-eval -f"]
    for name, each in subcommands().items():
        lines += [
            f'complete -c capmoe-eval -n __fish_use_subcommand -a {name} -d "{each.summary}"',
            f'complete -c capmoe-eval -n "__fish_seen_subcommand_from {name}" '
            f'-a "{" ".join(subcommand_words(name))}"',
        ]
    return "\n".join(lines)


_SCRIPTS: Final[Mapping[str, Callable[[], str]]] = {
    "bash": _bash,
    "zsh": lambda: f"autoload -U +X bashcompinit && bashcompinit\n{_bash()}",
    "fish": _fish,
}
