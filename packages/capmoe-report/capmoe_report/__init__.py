"""The claims of the paper, judged by finished records, and everything to browse.

A claim is data (``data/claims.yaml``, ``data/replication.yaml``). ``judge.judge`` returns a frame
with a row for each finding; ledger, replication and site show it. This package imports the suite
and is not imported by it.
"""
