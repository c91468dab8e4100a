"""The claims of the paper, judged by finished records, and everything to browse.

A claim is data (``data/claims.yaml``, ``data/replication.yaml``). ``judge.judge`` returns
each claim with its verdict and its findings; ledger, replication and site show them. This package
imports the suite and is not imported by it.
"""
