"""BANKING77 of LongICLBench with 1 to 5 shots per label, as tasks of lm-eval."""
