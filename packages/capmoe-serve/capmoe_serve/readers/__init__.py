"""Read the routing that servers write, each from its documented layout, as a trace.

A file that torch wrote is a pickle: it is read with ``weights_only=True`` or not at all.
"""
