"""List what the suite takes from inside lm-eval."""

from __future__ import annotations

from typing import Final

from capmoe_eval.wrapper.seam import Library

_HF = "lm_eval.models.huggingface"

LM_EVAL: Final = Library(
    ("lm-eval",),
    ("0.4.13",),
    (
        # Of the methods that `lm` replaces, a renamed one would be called no more.
        (_HF, "HFLM._create_model", ()),
        (_HF, "HFLM._create_tokenizer", ("pretrained", "tokenizer")),
        (_HF, "HFLM._loglikelihood_tokens", ("requests", "disable_tqdm", "override_bs")),
        (_HF, "HFLM._model_call", ("inps", "attn_mask", "labels")),
        # How it makes batches.
        (_HF, "Collator.get_batched", ()),
        # `tasks` replaces how a task is built, `evaluate` takes what a result file needs.
        ("lm_eval.tasks._factory", "TaskFactory._load_full_config", ()),
        ("lm_eval.evaluator_utils", "get_sample_size", ("task", "limit")),
        ("lm_eval.utils", "handle_non_serializable", ()),
    ),
)
