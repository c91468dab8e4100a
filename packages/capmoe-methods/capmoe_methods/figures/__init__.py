"""Declare the figures that the paper lacks; the suite imports it by an entry point."""

from capmoe_methods.figures import adaptive, comparators, decode, images, macs, quality, waste

__all__ = ["adaptive", "comparators", "decode", "images", "macs", "quality", "waste"]
