"""The tasks of Table 7, and the sandbox for programs that a model writes."""
