"""``python -m capmoe_eval.claims profile=zoo``: judge every claim of the paper."""

from collections.abc import Sequence

from capmoe_eval.experiment.application import run_program


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the ledger and exit: 0 written, 2 bad input."""
    from capmoe_eval.report.claims import command

    command.main(arguments)


if __name__ == "__main__":
    run_program(main)
