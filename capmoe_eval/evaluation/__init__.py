"""Evaluate cells with lm-evaluation-harness and write their records.

The only package that may import `lm_eval`.
"""
