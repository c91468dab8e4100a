"""MTS-Dialog as a task of lm-evaluation-harness, scored by ROUGE and, if asked, by BERTScore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.generation.bertscore import METRICS, BertScore, bertscore
from capmoe_eval.evaluation.yaml_task import YamlTask
from capmoe_eval.experiment.cell import TaskId

ROUGE = ("rouge1", "rouge2", "rougeL")
"""The F-measures of n-grams and of the longest common subsequence (Lin, 2004)."""


class MtsDialog(YamlTask):
    """The notes of MTS-Dialog, written after their dialogues; ``mts_dialog.yaml`` configures it.

    Every document has scores from 0 to 1 (a rescaled BERTScore may be below), also one with a short
    or empty answer, which lm-eval's own task leaves out.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        # It imports nltk, which no other evaluation need wait for.
        from rouge_score.rouge_scorer import RougeScorer

        self._rouge = RougeScorer(ROUGE)
        self._bertscore: BertScore | None = None
        # Named in the configuration, it keeps lm-eval from looking for the metrics on the hub.
        super().__init__(config={**config, "process_results": self._scores})

    def ask(self, task: TaskId) -> None:
        """Set the encoder of BERTScore that a cell names, or none; ``metadata`` says which.

        Raises:
            UsageError: If it cannot be had.
        """
        self._bertscore = used = None
        if task.encoder:
            self._bertscore = bertscore(task.encoder, task.layer, task.rescale)
            used = self._bertscore.identity()
        self.set_config("metadata", {"bertscore": used}, update=True)

    def _scores(self, doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
        """Return the scores of the one continuation in ``results``."""
        note, answer = doc["section_text"], results[0].strip()
        found = self._rouge.score(note, answer)
        scores = {name: float(found[name].fmeasure) for name in ROUGE}
        return scores | (self._bertscore.score(note, answer) if self._bertscore else {})


def check(task: TaskId, built: Sequence[Any]) -> None:
    """Refuse a BERTScore of a task that has none, one without an encoder, and one that fails.

    Raises:
        UsageError: Naming the key and what to do.
    """
    ours = [part for part in built if isinstance(part, MtsDialog)]
    if task.encoder and not ours:
        raise UsageError(
            f"tasks.{task.name}.encoder={task.encoder}: {task.name} has no BERTScore; leave it out"
        )
    if task.metric in METRICS and not task.encoder:
        raise UsageError(
            f"tasks.{task.name}.metric={task.metric}: needs an encoder; name a path or hub id, "
            f"tasks.{task.name}.encoder=roberta-large, or ask for rougeL"
        )
    for part in ours:
        part.ask(task)
