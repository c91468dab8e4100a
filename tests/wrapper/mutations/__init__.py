"""Wrong decisions, each a slip that a developer could make, and the check that all are refused.

A mutation replaces one function of the package by a changed one. `settings` runs tiny models under
every method, `table` lists the mutations, `test_mutations` applies each to every method that it
concerns: the run must differ from that of the true code, and an invariant must refuse it.
"""
