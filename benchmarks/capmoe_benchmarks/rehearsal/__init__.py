"""Benchmark `rehearsal`: every method on the paper's models, wide, with random weights."""
