"""``python -m capmoe_eval.tiny train olmoe``: train an embedded model."""

import sys

from capmoe_eval.evaluation.training.command import main

if __name__ == "__main__":
    sys.exit(main())
