"""Evaluate cells with lm-evaluation-harness and write their records.

The only room that may import `lm_eval`.
"""
