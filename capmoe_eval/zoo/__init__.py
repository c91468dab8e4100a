"""The trained tiny models: their recipes, how to train them, and their weights.

``python -m capmoe_eval.tiny train olmoe`` makes one anew.
"""

from capmoe_eval.zoo.recipes import ZOO, trained_model

__all__ = ["ZOO", "trained_model"]
