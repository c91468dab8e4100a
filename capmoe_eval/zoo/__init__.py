"""The trained tiny models: recipes, training and shipped weights.

``python -m capmoe_eval.tiny train olmoe`` trains one again.
"""

from capmoe_eval.zoo.recipes import ZOO, trained_model

__all__ = ["ZOO", "trained_model"]
