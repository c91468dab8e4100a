"""lm-eval's own command line with ``--model capmoe``, its sibling for images, and our tasks.

``capmoe-eval lm-eval run --model capmoe
--model_args pretrained=allenai/OLMoE-1B-7B-0924,method=score,gamma=1.0,ep_size=8 --tasks piqa``

``--model capmoe-multimodal`` takes the same arguments for a model that reads images.

The result file's ``config.capmoe`` holds the method, the loads and the proofs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from capmoe_eval.experiment.application import run_command

_HELP: Final = """\
lm-eval's own command line with two more models, capmoe and capmoe-multimodal:

  capmoe-eval lm-eval run --tasks piqa --model capmoe --batch_size 16 \\
    --model_args pretrained=allenai/OLMoE-1B-7B-0924,method=score,gamma=1.0,ep_size=8

--model_args takes the arguments of lm-eval's model hf, and the methods and knobs that
capmoe-eval run --help lists.
"""


def main(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line; a mistake of the user gives one line and status 2."""
    sys.argv[1:] = arguments
    if set(arguments) <= {"-h", "--help"}:
        print(_HELP)
    # lm-eval checks little of what it is given: its errors are mistakes of the user.
    status = run_command(_run, ("lm-eval stopped: ", 2))
    if status:
        sys.exit(status)


def _run() -> None:
    from lm_eval.__main__ import cli_evaluate

    import capmoe_eval.evaluation.lm  # noqa: F401 - registers both models

    options = {word.partition("=")[0] for word in sys.argv}
    if "--include_path" not in options and sys.argv[1:2] == ["run"]:
        sys.argv += ["--include_path", str(Path(__file__).parent)]
    cli_evaluate()
