"""Benchmark `ep`: the time of MoE layers under expert parallelism, on ranks or emulated."""
