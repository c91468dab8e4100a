"""Benchmark `gpu`: what a GPU must show, as one list that a cut-off run goes on with."""
