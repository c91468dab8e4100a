"""lm-evaluation-harness: the model ``capmoe``, the tasks, and the evaluation of a cell."""
