"""``python -m capmoe_eval.replication profile=zoo``: test the claims on every model."""

from collections.abc import Sequence

from capmoe_eval.experiment.application import run_program


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge and exit: 0 written, 2 bad input."""
    from capmoe_eval.report.replication import command

    command.main(arguments)


if __name__ == "__main__":
    run_program(main)
