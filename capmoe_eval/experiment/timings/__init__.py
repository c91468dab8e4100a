"""The files of ``results/bench/``; `schema` and `file` alone need pydantic."""
