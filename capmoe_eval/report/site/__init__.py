"""Build one static site from finished results: no server, no network.

A module describes each kind of page; its HTML is a template of `capmoe_eval.report.templates`.
"""
