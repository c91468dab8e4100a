"""``python -m capmoe_eval.figures fig7 profile=zoo``: draw a figure from finished records."""

from collections.abc import Sequence

from capmoe_eval.experiment.application import run_program


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw figures and exit: 0 drawn, 2 bad input."""
    from capmoe_eval.report.figures import command

    command.main(arguments)


if __name__ == "__main__":
    run_program(main)
