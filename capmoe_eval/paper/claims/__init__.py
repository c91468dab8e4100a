"""Every claim and number of the paper with a verdict (``docs/claims.md``)."""
