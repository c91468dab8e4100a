"""Finished records as data frames: what tables, figures and contrasts are computed from.

Imports neither torch nor transformers nor lm-eval.
"""
