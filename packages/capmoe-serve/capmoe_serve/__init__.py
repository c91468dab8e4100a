"""From a server's routing to a decision: traces, and what a capacity would do to them.

What is read at run time of a server enters here as a `Trace`; only readers of files that torch
wrote may import torch.
"""
