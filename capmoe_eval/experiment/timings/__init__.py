"""The files of ``results/bench/``, read and checked; only `schema` and `file` need pydantic."""
