"""``capmoe-eval run gamma=1.0 method=score``, and ``capmoe-eval sweep`` with lists of values.

Their ``--help`` has layers: the common keys, some names, or all groups, keys, methods and knobs.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omegaconf import DictConfig, OmegaConf

from capmoe_eval.errors import EnforcementError, UsageError, check_choice, shown
from capmoe_eval.evaluation.provenance import version_line
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.composition import (
    as_typed,
    config_directory,
    for_hydra,
    options,
    store_knobs,
)
from capmoe_eval.experiment.configuration import (
    CellPlan,
    check_overrides,
    expand_parts,
    model_notes,
    plans_at,
    settings_without_effect,
)
from capmoe_eval.experiment.observation import observer_options
from capmoe_eval.experiment.processes import process_rank
from capmoe_eval.experiment.reservations import print_warning
from capmoe_eval.experiment.settings import GROUPS
from capmoe_eval.results.packing import pack_idle
from capmoe_eval.routing.registry import knobs, method_class, method_names, methods_in_words

if TYPE_CHECKING:
    from capmoe_eval.evaluation.progress import Progress

_COMMON: Final = (
    *("model", "tasks", "experiment", "profile", "method", "gamma", "ep_size", "batch_size"),
    *("limit", "data.root", "dtype", "device", "results_dir", "plan"),
)
"""Groups and keys that ``--help`` explains without being asked for more."""


def execute(plans: Sequence[CellPlan]) -> int:
    """Compute the plans and print the results; return 0 if every cell is finished, else 1.

    Raises:
        UsageError: For a mistake that concerns all planned cells.
    """
    from capmoe_eval.evaluation.run import run

    done = run(plans)
    if done.computed and not process_rank():
        for root in sorted({plan.root for plan in plans}):
            pack_idle(root)
    if process_rank() and any(plan.parallel == "ep" for plan in plans):
        return 1 if done.failures else 0  # rank 0 prints
    skipped = done.finished - done.computed - done.by_others
    others = f"{done.by_others} by other processes, " if done.by_others else ""
    counts = f"{done.computed} computed, {others}{skipped} finished before"
    print_results(plans, done, f"{counts}, {len(done.failures)} failed")
    for cell, reason in done.failures:
        print(f"failed: {cell}: {reason}", file=sys.stderr)
    if done.failures:
        line = "CAPMOE_DEBUG=1 stops at the first failure with its traceback."
        if not any(plan.overwrite for plan in plans):
            line = f"The same command computes the failed cells again, and no others; {line}"
        print(line, file=sys.stderr)
    if any(reason.startswith(EnforcementError.__name__) for _, reason in done.failures):
        print(
            "An invariant is broken: mend the method, or report it (docs/reference/errors.md).",
            file=sys.stderr,
        )
    return 1 if done.failures else 0


def print_results(plans: Sequence[CellPlan], done: Progress, counts: str) -> None:
    """Print the results of the plans, the counts, and the cautions about the models' numbers."""
    if done.finished:
        print(done.summary())
    print(counts)
    for note in model_notes(sorted(plans, key=lambda p: (p.note or "", p.cell.model.name))):
        print(f"Note: {note}")
    for line in done.truncations:
        print_warning(line)


def evaluate(jobs: Iterable[tuple[Sequence[str], DictConfig]], words: Sequence[str]) -> int:
    """Evaluate the cells of some jobs all together, so that a model is loaded once.

    Args:
        jobs: The words of each job, and what Hydra composed of them.
        words: Those of the command line.

    Returns:
        The status: 0 if every cell is finished, else 1.

    Raises:
        UsageError: For a mistake in the words, or one that concerns all cells.
    """
    cells: dict[Path, CellPlan] = {}
    points: list[dict[str, Any]] = []
    for overrides, config in jobs:
        check_overrides(config, overrides)
        expanded = [point for part in expand_parts(config).values() for point in part()]
        cells |= {plan.path: plan for plan in plans_at(expanded)}
        points += expanded
    # lm-eval's progress bars would disturb our display; tqdm reads this when it is first imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from capmoe_eval.evaluation.run import idle

    for line in settings_without_effect(words, points, idle):
        print_warning(line)
    if config.plan or any(point["plan"] for point in points):
        from capmoe_eval.evaluation.forecast import forecast

        print(forecast([*cells.values()]))
        return 0
    return execute([*cells.values()])


def _task(config: DictConfig) -> int:
    """Compute a job that Hydra has composed: of one command line, or of a launcher's sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    job = HydraConfig.get()
    swept, words = job.mode == RunMode.MULTIRUN, as_typed(job.overrides.task)
    # Here and not only around Hydra, which adds a line of its own to any exception of a job.
    status = run_command(lambda: evaluate([(words, config)], words))
    # A launcher takes the end of a process for a crash: it gets the status, and sums up.
    if status and not (swept and status < 128):
        raise SystemExit(status)
    return status


def sweep(words: Sequence[str]) -> None:
    """Evaluate every combination of the values, and exit as :func:`main` does."""
    main(["-m", *words])


def main(words: Sequence[str]) -> None:
    """Evaluate and exit: 0 done, 1 a cell failed, 2 bad input, 130 interrupted."""
    sys.argv[1:] = words

    def command() -> int | None:
        import hydra

        flags = {word for word in words if word.startswith("-")}
        if "--version" in flags:  # Hydra would answer with its own
            print(version_line())
            return 0
        topics = [word for word in words if word[:1].isalpha() and "=" not in word]
        if topics and flags & {"-h", "--help"}:  # without topics, Hydra prints what usage() says
            print(usage(*topics))
            return 0
        if any(flag.startswith("--e") for flag in flags):  # also abbreviated
            raise UsageError(
                "--experimental-rerun: would run what is pickled in a file; repeat the command line"
            )
        if any(flag.startswith("--s") for flag in flags):
            raise UsageError("--shell-completion: is not there; run --help says what is")
        if "--resolve" in flags and not any(flag.startswith(("-c", "--c")) for flag in flags):
            raise UsageError("--resolve: is for --cfg job, which prints the configuration")
        for word in words:
            if word.startswith("hydra/launcher=") and not flags & {"-m", "--multirun"}:
                raise UsageError(f"{word}: starts the jobs of a sweep; add -m")
        # Hydra would print its own report of an error and exit 1; we say it in one line and exit 2.
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")
        store_knobs()
        sys.argv[1:] = for_hydra(words)
        run: Callable[[], int | None] = hydra.main(
            version_base="1.3", config_path=str(config_directory()), config_name="config"
        )(_task)
        return run()

    sys.exit(run_command(command))


def usage(*topics: str) -> str:
    """Return what ``capmoe-eval run --help`` says of the common keys, of some names, or of ``all``.

    Raises:
        UsageError: For a topic that is no group, key, method or knob.
    """
    entries = [*_entries(counts_names=not topics)]
    if not topics:
        # The first of a name: a key goes before the knob that it sets.
        text_by_name = {name: text for _, name, text in reversed(entries)}
        entries = [("Common keys (key=value)", name, text_by_name[name]) for name in _COMMON]
        entries.append(("Methods (method=name)", "", _row("methods", ", ".join(method_names()))))
    elif "all" not in topics:
        for topic in topics:
            if names := [name for name in GROUPS if topic in options(name)]:
                words = " or ".join(f"{name}={topic}" for name in names)
                raise UsageError(
                    f"--help={topic}: is written {words}; see --help {' '.join(names)}"
                )
            check_choice("--help", topic, [name for _, name, _ in entries])
        texts = (text for topic in topics for _, name, text in entries if name == topic)
        return "\n".join(texts)
    lines: list[str] = []
    for heading, of_heading in itertools.groupby(entries, key=itemgetter(0)):
        lines += ["", f"== {heading} ==", "", *(text for _, _, text in of_heading)]
    return "\n".join(lines[1:])


# ${capmoe.usage:}, in the help of the command line.
OmegaConf.register_new_resolver("capmoe.usage", usage)


def _entries(*, counts_names: bool) -> Iterator[tuple[str, str, str]]:
    """Yield heading, name and text of each entry; a key that is also a knob has two."""
    config = (config_directory() / "config.yaml").read_text(encoding="utf-8")
    defaults = dict(re.findall(r"(?m)^  - (\w+): (\w+)$", config))
    for name in GROUPS:
        names = f"{len(options(name))} names" if counts_names else ", ".join(options(name))
        yield "Groups (group=option)", name, _row(name, f"{names}{_default(defaults[name])}")
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
