"""The files of ``results/bench/``: one schema for the benchmarks that write and all that read.

Reading names and studies needs no pydantic; only `schema` does.
"""
