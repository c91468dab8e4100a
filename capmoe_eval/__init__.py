"""Reproduction suite for Capacity-Aware Inference in Mixture-of-Experts models."""
