"""``python -m capmoe_eval.tables table2 profile=zoo``: render a table from finished records."""

from collections.abc import Sequence

from capmoe_eval.experiment.application import run_program


def main(arguments: Sequence[str] | None = None) -> None:
    """Render tables and exit: 0 rendered, 2 bad input."""
    from capmoe_eval.report.tables import command

    command.main(arguments)


if __name__ == "__main__":
    run_program(main)
