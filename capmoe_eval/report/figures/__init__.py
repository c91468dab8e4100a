"""Draw the figures of the paper, and some that it lacks, from finished results.

A figure is declared as data in `catalogue.yaml`, which names two functions: one turns records into
plain numbers, which are written as JSON, and the other draws those numbers alone.
"""
