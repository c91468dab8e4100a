"""Measure the suite itself: speed, memory, and what a GPU or the paper's models would need."""
