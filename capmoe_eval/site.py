"""``python -m capmoe_eval.site profile=zoo``: build a report to browse from finished records."""

from collections.abc import Sequence

from capmoe_eval.experiment.application import run_program


def main(arguments: Sequence[str] | None = None) -> None:
    """Build and exit: 0 written, 2 bad input."""
    from capmoe_eval.report.site import command

    command.main(arguments)


if __name__ == "__main__":
    run_program(main)
