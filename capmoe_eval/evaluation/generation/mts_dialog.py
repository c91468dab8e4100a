"""MTS-Dialog as a task of lm-evaluation-harness, scored by ROUGE and, if asked, by BERTScore.

BERTScore is that of the package bert-score, an optional extra, on an encoder that is named.
"""

import functools
import importlib.metadata
import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any

from transformers.utils import resolve_revision

from capmoe_eval.errors import UsageError, first_line, shown
from capmoe_eval.evaluation.provenance import weights_hash
from capmoe_eval.evaluation.tasks import YamlTask
from capmoe_eval.experiment.cell import TaskId

ROUGE = ("rouge1", "rouge2", "rougeL")
"""The F-measures of n-grams and of the longest common subsequence (Lin, 2004)."""

METRICS = ("bertscore_precision", "bertscore_recall", "bertscore_f1")
"""The scores of a pair of texts, in the order in which bert-score returns them."""


class BertScore:
    """Greedy matching of the tokens of two texts by the cosine of their hidden states.

    Zhang et al. (2020), equations 1 to 3, without weights by inverse document frequency: recall is
    the mean over the reference's words of the highest cosine with a token of the answer, precision
    the same the other way round. A word may match the marks around a text, [CLS] and [SEP], which
    count for nothing themselves. With ``rescale``, each is (score − b) / (1 − b), where the package
    has the b of the encoder and layer.

    ``encoder`` is a path or hub id, and ``layer`` its hidden layer; None for the package's choice,
    which it has for known ids.

    Raises:
        UsageError: If the package or the encoder is absent, or has no such layer or baseline.
    """

    def __init__(self, encoder: str, layer: int | None, rescale: bool) -> None:
        try:
            from bert_score import BERTScorer
        except ImportError as error:
            raise UsageError(
                f"encoder={encoder}: BERTScore needs the package bert-score ({first_line(error)}); "
                "pip install 'capmoe-eval[bertscore]', or leave the encoder out"
            ) from error
        from bert_score.utils import model2layers

        if layer is None and encoder not in model2layers:
            raise UsageError(
                f"layer=null: bert-score knows no layer for {encoder}; name one, such as layer=17"
            )
        try:
            with redirect_stderr(io.StringIO()):  # the library's progress bars
                self._scorer: Any = BERTScorer(
                    encoder, num_layers=layer, lang="en", rescale_with_baseline=rescale
                )
            if rescale:
                _ = self._scorer.baseline_vals
        except Exception as error:  # of many kinds, as of any checkpoint
            raise UsageError(
                f"encoder={encoder}, layer={shown(layer)}, rescale={shown(rescale)}: "
                f"{first_line(error)}; name a path or hub id of an encoder with such a layer"
            ) from error

    def identity(self) -> dict[str, Any]:
        """Return what the scores depend on, JSON-ready."""
        scorer = self._scorer
        commit = resolve_revision(scorer.model_type, local_files_only=True)
        return {
            "encoder": scorer.model_type,
            "layer": scorer.num_layers,
            "rescale": scorer.rescale_with_baseline,
            "weights": weights_hash(scorer._model),
            "commit": getattr(commit, "resolved", None),
            "bert-score": importlib.metadata.version("bert-score"),
        }

    def score(self, reference: str, answer: str) -> dict[str, float]:
        """Return precision, recall and F1; 0 where a text is empty."""
        if not answer.strip() or not reference.strip():
            return dict.fromkeys(METRICS, 0.0)
        scores = self._scorer.score([answer], [reference])
        return {name: float(value) for name, value in zip(METRICS, scores, strict=True)}


_bertscore = functools.lru_cache(maxsize=1)(BertScore)  # keeps the last one


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
            self._bertscore = _bertscore(task.encoder, task.layer, task.rescale)
            used = self._bertscore.identity()
        self.set_config("metadata", {"bertscore": used}, update=True)

    def _scores(self, doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
        """Return the scores of the one continuation in ``results``."""
        note, answer = doc["section_text"], results[0].strip()
        rouge = self._rouge.score(note, answer)
        scores = {name: float(rouge[name].fmeasure) for name in ROUGE}
        return scores | (self._bertscore.score(note, answer) if self._bertscore else {})


def check_bertscore(task: TaskId, parts: Sequence[Any]) -> None:
    """Refuse a BERTScore of a task that has none, one without an encoder, and one that fails.

    Raises:
        UsageError: Naming the key and what to do.
    """
    ours = [part for part in parts if isinstance(part, MtsDialog)]
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
