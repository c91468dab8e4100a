"""The command line that computes a record's cell again."""

from __future__ import annotations

from typing import Any

from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.commands import cell_command
from capmoe_eval.experiment.configuration import load_option, options
from capmoe_eval.experiment.selection import model_defaults, plain


class Reproduction:
    """Returns the commands that compute cells again; each option of ``conf/`` is read once."""

    def __init__(self) -> None:
        self._models = set(options("model"))
        self._tasks = set(options("tasks"))
        self._settings: dict[str, dict[str, Any]] = {}

    def command(self, cell: Cell, results: str) -> str | None:
        """Return one shell command line, or None if the cell's task is none of ``conf/tasks/``.

        Args:
            cell: The cell.
            results: Where the new record should go.
        """
        task = cell.task.name
        if task not in self._tasks:
            return None
        if task not in self._settings:
            self._settings[task] = plain(load_option("tasks", task)).get(task) or {}
        model = cell.model.name if cell.model.name in self._models else "custom"
        return cell_command(cell, model_defaults(model), self._settings[task], results)
