"""BERTScore by the package bert-score, an optional extra, on an encoder that is named."""

from __future__ import annotations

import functools
import importlib.metadata
import io
from contextlib import redirect_stderr
from typing import Any

from capmoe_eval.errors import UsageError, first_line, shown
from capmoe_eval.evaluation.provenance import weights_hash

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
        return {
            "encoder": scorer.model_type,
            "layer": scorer.num_layers,
            "rescale": scorer.rescale_with_baseline,
            "weights": weights_hash(scorer._model),
            "commit": getattr(scorer._model.config, "_commit_hash", None),
            "bert-score": importlib.metadata.version("bert-score"),
        }

    def score(self, reference: str, answer: str) -> dict[str, float]:
        """Return precision, recall and F1; 0 where a text is empty."""
        if not answer.strip() or not reference.strip():
            return dict.fromkeys(METRICS, 0.0)
        scores = self._scorer.score([answer], [reference])
        return {name: float(value) for name, value in zip(METRICS, scores, strict=True)}


bertscore = functools.lru_cache(maxsize=1)(BertScore)
"""Return a :class:`BertScore`; the last one is kept."""
