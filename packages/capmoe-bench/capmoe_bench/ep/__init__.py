"""Benchmark `ep`: the time of MoE layers under expert parallelism."""
