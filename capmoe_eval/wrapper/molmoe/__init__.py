"""MolmoE for transformers 5, by its checkpoint's own names.

The hub has MolmoE as code of its own, for transformers 4.46 to 4.53. Its language model is an OLMoE
with a larger vocabulary, which transformers has; here are the rest and the names of the tensors.
`docs/multimodal.md` says how it was compared with that code.
"""
