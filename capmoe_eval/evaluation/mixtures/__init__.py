"""Groups of tasks whose requests lm-eval pools, so that one batch can hold several tasks.

``TaskManager(include_path=TASKS_DIR)`` finds ``zero_shot_mix``: OBQA, PIQA, RTE and BoolQ.
"""

from pathlib import Path

TASKS_DIR = Path(__file__).parent
"""The directory of the YAML files."""
