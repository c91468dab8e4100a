"""The files of ``results/bench/``; `schema` alone needs pydantic."""
