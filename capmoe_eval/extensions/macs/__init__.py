"""MACS: capacities that depend on the modalities of a batch and on the weights of its tokens."""

from capmoe_eval.extensions.macs.method import MACS

__all__ = ["MACS"]
