"""``python -m capmoe_eval gamma=1.0 method=score``: evaluate a cell, a sweep or an experiment."""

from capmoe_eval.experiment.application import run_program


def main() -> None:
    """Run the command line and exit: 0 done, 1 a cell failed, 2 bad input, 130 interrupted."""
    from capmoe_eval.evaluation import command

    command.main()


def program() -> None:
    """Run the command line as the program ``capmoe-eval``."""
    run_program(main)


if __name__ == "__main__":
    program()
