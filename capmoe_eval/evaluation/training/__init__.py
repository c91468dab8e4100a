"""Train, measure and describe the embedded models."""
