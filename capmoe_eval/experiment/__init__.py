"""An experiment and its results: configuration, cells, and the records on disk.

Neither torch nor lm-eval may be imported here, so that reports start quickly.
"""
