"""A capacity inside a vLLM server: the routers of a running engine under a method of the suite.

Nothing here may know of lm-eval or of a record; vLLM is imported by no other package.
"""
