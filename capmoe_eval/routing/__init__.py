"""Routing decisions under a capacity, on plain tensors.

Only torch may be imported here, and `method` does not even need that.
"""
