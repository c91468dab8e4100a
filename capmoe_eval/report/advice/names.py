"""Names of the files of an advice, and of the embedded trace."""

from typing import Final

JSON: Final = "advice.json"
PAGE: Final = "advice.html"
EXAMPLE: Final = "example"
"""Stands on the command line for the trace in the package."""
EXAMPLE_MODEL: Final = "zoo_olmoe"
"""The model of that trace."""
