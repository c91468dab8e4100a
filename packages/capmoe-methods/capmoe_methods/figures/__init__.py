"""Declare the figures of the methods beside Token Drop; the suite imports it by an entry point."""

from __future__ import annotations

from capmoe_methods.figures import adaptive, comparators, macs

__all__ = ["adaptive", "comparators", "macs"]
