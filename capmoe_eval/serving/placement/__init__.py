"""Balance without loss: experts in slots, tokens over replicas, and what that gives and costs.

Functions on plain arrays of loads: neither torch nor a trace is needed here.
"""
