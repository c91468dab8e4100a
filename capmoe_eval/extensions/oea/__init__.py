"""OEA: each token uses the best of the experts that the batch activates anyway."""

from capmoe_eval.extensions.oea.method import OEA

__all__ = ["OEA"]
