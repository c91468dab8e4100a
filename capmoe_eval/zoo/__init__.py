"""The embedded models: recipes, training, shipped weights, and the worlds they are trained on.

Nothing here may know of lm-eval or of a record.
"""
