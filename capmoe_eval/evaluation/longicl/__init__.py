"""BANKING77 of LongICLBench: its protocol, and its tasks of lm-eval."""
