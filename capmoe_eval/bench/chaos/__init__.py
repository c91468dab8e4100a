"""Benchmark `chaos`: sweeps that are killed, restarted, and compared with one that was not."""
