"""Observe the forwards of a model: each module reads the same events and knows no other."""
