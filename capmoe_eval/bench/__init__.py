"""The benchmarks of speed and memory, which write ``results/bench/``.

No other room may import them.
"""
