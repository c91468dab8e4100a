"""BANKING77 of LongICLBench with 1 to 5 shots per label, as tasks of lm-evaluation-harness.

``TaskManager(include_path=TASKS_DIR)`` finds ``longicl_banking77_1shot`` up to ``_5shot``.
"""

from pathlib import Path

#: The directory of the tasks' YAML files.
TASKS_DIR = Path(__file__).parent

__all__ = ["TASKS_DIR"]
