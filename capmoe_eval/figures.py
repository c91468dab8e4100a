"""``python -m capmoe_eval.figures fig7 profile=zoo``: draw a figure from finished records."""

from capmoe_eval.report.figures.command import main

if __name__ == "__main__":
    main()
