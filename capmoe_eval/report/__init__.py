"""Render finished results: tables, figures, ledgers and the site.

Nothing is computed here that another package could need, and torch may not be imported.
"""
