"""Check a method's decisions by its definition, with code of their own.

The check gets what a forward was called with, what the routers returned, and what the experts were
called with. It forms the capacity groups, the capacities, the kept pairs and their weights by
itself, in NumPy (:mod:`capmoe_eval.routing.definition`), and shares no function with the decision.
"""
