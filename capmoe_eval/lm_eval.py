"""``python -m capmoe_eval.lm_eval run --model capmoe``: run lm-eval with the model capmoe."""

from capmoe_eval.experiment.application import run_program


def main() -> None:
    """Run lm-eval's command line; a mistake of the user gives one line and status 2."""
    from capmoe_eval.evaluation import lm_eval_command

    lm_eval_command.main()


if __name__ == "__main__":
    run_program(main)
