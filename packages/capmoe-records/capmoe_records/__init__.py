"""The committed records of the embedded models; the wheel has them in ``zoo/``."""
