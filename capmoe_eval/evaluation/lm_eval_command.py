"""lm-eval's own command line with ``--model capmoe``, its sibling for images, and our tasks.

``capmoe-eval lm-eval run --model capmoe
--model_args pretrained=allenai/OLMoE-1B-7B-0924,method=score,gamma=1.0,ep_size=8 --tasks piqa``

``--model capmoe-multimodal`` takes the same arguments for a model that reads images.

The result file's ``config.capmoe`` holds the method, the loads and the proofs.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from capmoe_eval.errors import UsageError, bad_choice
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.composition import options
from capmoe_eval.routing.registry import knobs

_HELP: Final = """\
lm-eval's own command line with two more models, capmoe and capmoe-multimodal:

  capmoe-eval lm-eval run --tasks piqa --model capmoe --batch_size 16 \\
    --model_args pretrained=allenai/OLMoE-1B-7B-0924,method=score,gamma=1.0,ep_size=8

--model_args takes the arguments of lm-eval's model hf, and the methods and knobs that
capmoe-eval run --help lists. pretrained is a hub id or a directory; an embedded model is evaluated
with capmoe-eval run model=zoo_olmoe.
"""
_EMBEDDED: Final = re.compile(r"\bpretrained=((?:zoo|tiny):(\w*))")
_CAPACITY: Final = re.compile(r"(?:^|[\s,])(method|gamma)=")


def main(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line; a mistake of the user gives one line and status 2."""
    sys.argv[1:] = arguments
    if set(arguments) <= {"-h", "--help"}:
        print(_HELP)
    # lm-eval checks little of what it is given: its errors are mistakes of the user.
    status = run_command(_run, ("lm-eval stopped: ", 2))
    if status:
        sys.exit(status)


def _check(line: str) -> None:
    """Refuse what the user means for ``capmoe``, and lm-eval would refuse without a hint."""
    if embedded := _EMBEDDED.search(line):
        names = (embedded[1].replace(":", "_"), embedded[2])
        config = next((name for name in names if name in options("model")), "zoo_olmoe")
        raise UsageError(
            f"{embedded[0]}: an embedded model, which lm-eval's command line cannot load; evaluate "
            f"it with capmoe-eval run model={config} tasks=NAME, or give a hub id or a directory "
            "to --model capmoe"
        )
    for directory in re.findall(r"--include_path[= ](\S+)", line):
        if not Path(directory).is_dir():
            raise UsageError(f"--include_path={directory}: no such directory")
    if re.search(r"--model[= ]hf\b", line) and (knob := _CAPACITY.search(line)):
        raise UsageError(f"--model hf: has no {knob[1]} and no capacity; write --model capmoe")


def _check_arguments(line: str, kind: type) -> None:
    """Refuse ``--model_args`` that have no effect, or that lm-eval does not know.

    lm-eval hands what it does not know on to transformers, so that a name is refused only where it
    is nearly that of a knob. ``kind`` is the class of the model.
    """
    arguments = re.search(r"--model_args[= ](.*?)(?= --|$)", line)
    if arguments is None or not re.search(r"--model[= ]capmoe", line):
        return
    names = re.findall(r"(?:^|[\s,])(\w+)=", arguments[1])
    settings = ["gamma", *knobs()]
    if "method" not in names:
        for name in names:
            if name in settings:
                raise UsageError(f"{name}: has no effect without a method; add method=score")
    makers = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    taken = {name for maker in makers for name in inspect.signature(maker).parameters}
    for name in sorted({*names} - taken - {*settings}):
        if close := difflib.get_close_matches(name, ["method", *settings], 1, 0.75):
            raise UsageError(f"{name}: did you mean {close[0]!r}?")


def _run() -> None:
    line = " ".join(sys.argv[1:])
    _check(line)
    from lm_eval.__main__ import cli_evaluate

    from capmoe_eval.evaluation.lm import CapmoeMultimodalLM  # its module registers both models

    _check_arguments(line, CapmoeMultimodalLM)
    named = {word.partition("=")[0] for word in sys.argv}
    if "--include_path" not in named and sys.argv[1:2] == ["run"]:
        sys.argv += ["--include_path", str(Path(__file__).parent)]
    try:
        cli_evaluate()
    except ValueError as error:
        if not (unknown := re.match(r"Tasks not found: ([^,]*)", str(error))):
            raise
        from capmoe_eval.evaluation.tasks import task_manager

        tasks = task_manager(unknown[1]).all_tasks
        mistake = bad_choice("--tasks", unknown[1], tasks)
        raise UsageError(f"{mistake}; --include_path DIR has tasks of your own") from error
