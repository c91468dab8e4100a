"""A closed world in simple English: facts, a training corpus and held-out questions.

The questions have the columns of the real evaluation sets, so that lm-eval's own tasks read them.
"""
