"""lm-eval's own command line with ``--model capmoe``, its sibling for images, and our tasks.

``capmoe-eval lm-eval run --model capmoe
--model_args pretrained=allenai/OLMoE-1B-7B-0924,method=score,gamma=1.0,ep_size=8 --tasks piqa``

``--model capmoe-multimodal`` takes the same arguments for a model that reads images.

The result file's ``config.capmoe`` holds the method, the loads and the proofs.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from capmoe_eval.errors import UsageError, bad_choice, shown
from capmoe_eval.experiment.application import run_command
from capmoe_eval.experiment.cell import TINY, ZOO
from capmoe_eval.experiment.composition import options

if TYPE_CHECKING:
    from lm_eval.config.evaluate_config import EvaluatorConfig

_HELP: Final = """\
lm-eval's own command line with two more models, capmoe and capmoe-multimodal:

  capmoe-eval lm-eval run --tasks piqa --model capmoe --batch_size 16 \\
    --model_args pretrained=allenai/OLMoE-1B-7B-0924,method=score,gamma=1.0,ep_size=8

--model_args takes the arguments of lm-eval's model hf, and the methods and knobs that
capmoe-eval run --help lists. pretrained is a hub id or a directory; an embedded model is evaluated
with capmoe-eval run model=zoo_olmoe.
"""


def main(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line; a mistake of the user gives one line and status 2."""
    sys.argv[1:] = arguments
    if set(arguments) <= {"-h", "--help"}:
        print(_HELP)
    # lm-eval checks little of what it is given: its errors are mistakes of the user.
    if status := run_command(_run, ("lm-eval stopped: ", 2)):
        sys.exit(status)


def _check(config: EvaluatorConfig) -> None:
    """Refuse what the user means for ``capmoe``, and lm-eval would refuse without a hint."""
    pretrained = str(config.model_args.get("pretrained"))
    if pretrained.startswith((ZOO, TINY)):
        names = (pretrained.replace(":", "_"), pretrained.partition(":")[2])
        option = next((name for name in names if name in options("model")), "zoo_olmoe")
        raise UsageError(
            f"pretrained={shown(pretrained)}: an embedded model, which lm-eval's command line "
            f"cannot load; evaluate it with capmoe-eval run model={option} tasks=NAME, or give a "
            "hub id or a directory to --model capmoe"
        )
    knob = next((name for name in ("method", "gamma") if name in config.model_args), None)
    if config.model == "hf" and knob:
        raise UsageError(f"--model hf: has no {knob} and no capacity; write --model capmoe")


def _folders(include_path: str | None) -> list[str]:
    """Return the folder of our tasks and the user's; of two tasks of a name, lm-eval has the last.

    Raises:
        UsageError: If the user's is no directory.
    """
    folders = [] if include_path is None else [include_path]
    if not all(Path(folder).is_dir() for folder in folders):
        raise UsageError(f"--include_path={shown(include_path)}: no such directory")
    return [str(Path(__file__).parent), *folders]


def _run() -> None:
    from lm_eval.__main__ import HarnessCLI, setup_logging
    from lm_eval.config import evaluate_config

    from capmoe_eval.evaluation.lm import LM_EVAL  # a module that registers both models
    from capmoe_eval.evaluation.tasks import task_manager

    LM_EVAL.check()
    stock = evaluate_config.EvaluatorConfig

    class Config(stock):  # type: ignore[misc,valid-type]
        """lm-eval's options as it reads them, from the command line and from files."""

        @classmethod
        def from_cli(cls, namespace: Namespace) -> EvaluatorConfig:
            config: EvaluatorConfig = super().from_cli(namespace)
            _check(config)
            config.include_path = _folders(config.include_path)
            return config

    setup_logging()
    parser = HarnessCLI()
    arguments = parser.parse_args()
    _folders(getattr(arguments, "include_path", None))
    try:
        # No public way leads from options as they are read to an evaluation.
        evaluate_config.EvaluatorConfig = Config
        parser.execute(arguments)
    except ValueError as error:
        if not (unknown := re.match(r"Tasks not found: ([^,]*)", str(error))):
            raise
        tasks = task_manager(unknown[1]).all_tasks
        choices = bad_choice("--tasks", unknown[1], tasks)
        raise UsageError(f"{choices}; --include_path DIR has tasks of your own") from error
    finally:
        evaluate_config.EvaluatorConfig = stock
