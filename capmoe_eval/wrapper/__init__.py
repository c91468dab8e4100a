"""A transformers model under a capacity: hooks on its routers, loads and proofs.

No record, file or command belongs here; `parallel/` spreads the experts over processes.
"""
