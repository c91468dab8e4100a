"""A transformers model under a capacity: hooks on its routers, loads and proofs.

No record, file or command belongs here; `parallel/` spreads the experts over processes.
"""

from capmoe_eval.wrapper.seam import TRANSFORMERS

TRANSFORMERS.check()  # before the modules here import what another version may not have
