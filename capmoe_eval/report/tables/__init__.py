"""Fill the layouts of `capmoe_eval.paper.layout` with numbers and write them.

Formats: Markdown, LaTeX and CSV.
"""
