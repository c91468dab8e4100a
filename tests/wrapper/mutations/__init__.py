"""Wrong decisions, each a slip that a developer could make, and the check that all are refused.

A `mutation` puts a wrong value into one place of the package while a tiny model runs under a
setting. `stages` is a table: every stage of a decision with every change of a value like its own.
`slips` are the wrong decisions that no single wrong value makes. `test_mutations` applies each to
every method that it concerns: an invariant must refuse each run that differs from the true one.
"""
