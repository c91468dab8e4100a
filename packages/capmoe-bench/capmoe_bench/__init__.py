"""The benchmarks of speed and memory; they write ``results/bench/``."""
