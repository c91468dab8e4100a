"""The subcommand of ``capmoe-eval`` that this package brings."""

TRAIN = ("Evaluate", "train an embedded model from its recipe", "capmoe_zoo.embedded.command:main")
