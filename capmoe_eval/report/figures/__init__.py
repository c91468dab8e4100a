"""Draw the figures of the paper, and some that it lacks, from finished results.

A figure is declared as data in `catalogue`: `measure` turns records into plain numbers, which are
written as JSON, and `draw` sees those numbers alone.
"""
