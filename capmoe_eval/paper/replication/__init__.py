"""Tests of the claims on every model of a profile (``experiment=replicate``)."""
