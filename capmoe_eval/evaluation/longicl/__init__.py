"""BANKING77 of LongICLBench with 1 to 5 shots per label, as tasks of lm-eval.

``TaskManager(include_path=TASKS_DIR)`` finds ``longicl_banking77_1shot`` up to ``_5shot``.
"""

from pathlib import Path

TASKS_DIR = Path(__file__).parent
"""The directory of the YAML files."""
