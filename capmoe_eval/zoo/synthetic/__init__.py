"""Untrained tiny models, their tokenizer and synthetic documents, made in seconds.

They score as chance does and serve to run every command of the suite.
"""
