"""A task of lm-evaluation-harness whose YAML file names a class of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval.api.task import ConfigurableTask


class YamlTask(ConfigurableTask):
    """A task that is configured by a YAML file and has methods of its own."""

    def __init__(
        self,
        data_dir: str | None = None,
        cache_dir: str | None = None,
        download_mode: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        # "class" names this class in a YAML file; it is not a setting of the task.
        settings = {key: value for key, value in (config or {}).items() if key != "class"}
        super().__init__(data_dir, cache_dir, download_mode, config=settings)
