"""``python -m capmoe_eval.lm_eval run --model capmoe``: run lm-eval with the model capmoe."""

from capmoe_eval.evaluation.lm_eval_command import main

if __name__ == "__main__":
    main()
