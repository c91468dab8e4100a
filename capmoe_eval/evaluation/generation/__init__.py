"""The generation tasks of Table 7 that lm-eval lacks, or cannot run offline."""
