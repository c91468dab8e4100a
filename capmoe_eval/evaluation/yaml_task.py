"""A task of lm-evaluation-harness whose YAML file names a class of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval.api.task import ConfigurableTask


class YamlTask(ConfigurableTask):
    """A task that is configured by a YAML file and has methods of its own."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        # "class" names this class in a YAML file; it is not a setting of the task.
        super().__init__(config={key: own for key, own in config.items() if key != "class"})
