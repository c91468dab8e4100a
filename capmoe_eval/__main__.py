"""``python -m capmoe_eval gamma=1.0 method=score``: evaluate a cell, a sweep or an experiment."""

from capmoe_eval.evaluation.command import main

if __name__ == "__main__":
    main()
