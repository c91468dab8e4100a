"""``python -m capmoe_eval.tiny train olmoe``: train an embedded model."""

from collections.abc import Sequence

from capmoe_eval.experiment.application import run_program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command on the words of a command line; return its exit status."""
    from capmoe_eval.evaluation.training import command

    return command.main(arguments)


if __name__ == "__main__":
    run_program(main)
