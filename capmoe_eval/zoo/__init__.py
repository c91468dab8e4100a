"""The embedded models and the evaluation sets that come with the suite.

``capmoe-zoo`` (``packages/capmoe-zoo``) trains the models and generates the sets. Nothing here may
know of lm-eval or of a record.
"""

from pathlib import Path

#: The directory of the trained models, with one directory for each.
WEIGHTS = Path(__file__).with_name("weights")
