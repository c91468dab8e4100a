"""Every claim and number of the paper with a verdict (``docs/explanation/verdicts.md``)."""
