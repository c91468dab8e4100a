"""Draw the figures of the paper, and some that it lacks, from finished results.

A figure is declared with two functions: one turns results into plain numbers, which are written as
CSV, and the other draws those numbers alone; its docstring is the caption.
"""
