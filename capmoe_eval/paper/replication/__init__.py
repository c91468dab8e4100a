"""Tests of the claims on every model of a profile, from the records of ``experiment=replicate``."""
