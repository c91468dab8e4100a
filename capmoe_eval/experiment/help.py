"""The text of ``capmoe-eval run --help``: groups, keys, methods, knobs and observers' options."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Final

from omegaconf import OmegaConf

from capmoe_eval.errors import check_choice, shown
from capmoe_eval.experiment.composition import config_directory, options
from capmoe_eval.experiment.observation import observer_options
from capmoe_eval.experiment.settings import GROUPS
from capmoe_eval.routing.registry import knobs, method_class, method_names, methods_in_words

_COMMON: Final = (
    *("model", "tasks", "experiment", "profile", "method", "gamma", "ep_size", "batch_size"),
    *("limit", "data.root", "dtype", "device", "results_dir", "plan"),
)
"""Groups and keys that ``--help`` explains without being asked for more."""


def usage(*topics: str) -> str:
    """Return what ``capmoe-eval run --help`` says of the common keys, of some names, or of ``all``.

    Raises:
        UsageError: For a topic that is no group, key, method or knob.
    """
    groups = {name: options(name) for name in GROUPS}
    entries = [*_entries(groups)]
    if not topics:
        counts = {name: [f"{len(choices)} names"] for name, choices in groups.items()}
        # The first of a name: a key goes before the knob that it sets.
        text_by_name = {name: text for _, name, text in reversed([*_entries(counts)])}
        heading = "Common keys (key=value)"
        entries = [(heading, name, text_by_name[name]) for name in _COMMON]
        entries.append(("Methods (method=name)", "", _row("methods", ", ".join(method_names()))))
    elif "all" not in topics:
        for topic in topics:
            check_choice("--help", topic, [name for _, name, _ in entries])
        texts = (text for topic in topics for _, name, text in entries if name == topic)
        return "\n".join(texts)
    lines: list[str] = []
    for heading, of_heading in itertools.groupby(entries, key=itemgetter(0)):
        lines += ["", f"== {heading} ==", "", *(text for _, _, text in of_heading)]
    return "\n".join(lines[1:])


# ${capmoe.usage:}, in the help of the command line.
OmegaConf.register_new_resolver("capmoe.usage", usage)


def _entries(groups: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str, str]]:
    """Yield heading, name and text of each entry; a key that is also a knob has two."""
    config = (config_directory() / "config.yaml").read_text(encoding="utf-8")
    defaults = dict(re.findall(r"(?m)^  - (\w+): (\w+)$", config))
    for name, choices in groups.items():
        text = _row(name, f"{', '.join(choices)}{_default(defaults[name])}")
        yield "Groups (group=option)", name, text
    yield from _keys(config)
    for name in method_names():
        kind = method_class(name)
        summary = str(kind.__doc__).strip().splitlines()[0]
        yield "Methods (method=name)", name, _paragraph(name, summary, kind.source)
    heading = "Knobs of methods (knob=value; a knob that a method lacks has no effect)"
    for knob in knobs().values():
        values = f"{knob.values} [{methods_in_words(knob.name)}]"
        text = _paragraph(f"{knob.name}={shown(knob.default)}", knob.help, values)
        yield heading, knob.name, text
    for option in observer_options().values():
        text = _paragraph(f"{option.name}={shown(option.default)}", option.help, option.values)
        yield "Observers of a run (key=value; they change no result)", option.name, text


def _keys(config: str) -> Iterator[tuple[str, str, str]]:
    """Yield the entries of the keys of ``conf/config.yaml``.

    A section is a line of comment before keys, the help of a key the comment behind it.
    """
    heading, prefix = "", ""
    for line in config.splitlines():
        if comment := re.fullmatch(r"# (\w[\w' ]*)", line):
            heading = f"{comment[1]} (key=value)"
        elif section := re.fullmatch(r"(\w+):", line):
            prefix = f"{section[1]}."
        elif key := re.fullmatch(r"( *)(\w+): (.+?) +# (.+)", line):
            name = f"{prefix}{key[2]}" if key[1] else key[2]
            yield heading, name, _row(name, f"{key[4]}{_default(key[3])}")


def _default(value: str) -> str:
    if "${model." in value and not value.startswith("results"):
        return " (default: the model's)"
    if value.startswith("${oc.select:profile"):
        return " (default: the profile's, or all)"
    plain = value.replace("${model.profile}", "PROFILE")
    return "" if plain in ("null", "{}", "false") else f" (default: {plain})"


def _row(name: str, text: str) -> str:
    """Return a name with a text beside it."""
    first = f"  {name:22}  "
    return textwrap.fill(text, 100, initial_indent=first, subsequent_indent=" " * len(first))


def _paragraph(heading: str, *parts: str) -> str:
    """Return a heading with texts below it."""
    indent = " " * 4
    texts = (textwrap.fill(p, 100, initial_indent=indent, subsequent_indent=indent) for p in parts)
    return "\n".join([heading, *filter(None, texts)])
