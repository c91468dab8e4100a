"""XShare: a batch activates the experts with the most gate score, under a budget."""

from capmoe_eval.extensions.xshare.method import XShare

__all__ = ["XShare"]
