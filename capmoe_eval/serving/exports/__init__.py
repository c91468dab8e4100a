"""Write files that servers take; each is checked against the server's documented schema.

A field that the server's public source or documentation does not show is left out.
"""
