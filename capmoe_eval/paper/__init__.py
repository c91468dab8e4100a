"""What the paper prints, and the words for what becomes of its claims.

Nothing here reads a record or imports another part of the suite.
"""
