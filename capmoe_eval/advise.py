"""``python -m capmoe_eval.advise TRACE --ranks 8``: recommend a capacity, or none, from a trace."""

from collections.abc import Sequence

from capmoe_eval.experiment.application import run_program


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with the readers of every kind of trace."""
    from capmoe_eval.report.advice import command
    from capmoe_eval.serving.readers.formats import read_trace

    command.main(read_trace, arguments)


if __name__ == "__main__":
    run_program(main)
