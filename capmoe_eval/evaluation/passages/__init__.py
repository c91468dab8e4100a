"""Held-out passages: how documents are cut, and the tasks that score them."""
