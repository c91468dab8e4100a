"""Runs command lines of ``capmoe-eval run`` one after the other, as one rank."""

from __future__ import annotations

import json
import sys

from capmoe_eval.__main__ import main

if __name__ == "__main__":
    for words in json.loads(sys.argv[1]):
        sys.argv = ["capmoe_eval", *words]
        try:
            main()
        except SystemExit as done:
            if done.code:
                raise
