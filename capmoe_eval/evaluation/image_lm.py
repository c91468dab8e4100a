"""Define ``capmoe-multimodal``: lm-eval's Hugging Face model of images and text, under a capacity.

It is ``capmoe`` over lm-eval's ``hf-multimodal``: requests with images go to the latter, those of
text to ``hf``, all with the capacity, the batches and the proofs of ``capmoe``.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.hf_vlms import HFMultimodalLM
from torch import Tensor
from transformers import ProcessorMixin

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.lm import CapmoeLM
from capmoe_eval.wrapper.checkpoint import one_line


@register_model("capmoe-multimodal")
class CapmoeMultimodalLM(CapmoeLM, HFMultimodalLM):
    """A Mixture-of-Experts model of lm-eval that reads images, whose experts have a capacity.

    Args:
        pretrained: As for ``hf-multimodal``: a hub id, a path, or a loaded model.
        tokenizer: Its processor: a hub id, a path, or a loaded one, which a loaded model needs.
        **kwargs: As for :class:`CapmoeLM`, and whatever ``hf-multimodal`` takes.

    Raises:
        UsageError: As for :class:`CapmoeLM`, for an automatic batch size, and for a processor that
            cannot be loaded.
    """

    def __init__(self, pretrained: Any, *args: Any, **kwargs: Any) -> None:
        if str(kwargs.get("batch_size")).startswith("auto"):
            raise UsageError(
                "batch_size=auto: lm-eval does not search it for a model with images; choose a "
                "number, such as batch_size=16"
            )
        super().__init__(pretrained, *args, **kwargs)

    @property
    def reader(self) -> Any:
        """The processor of images and text."""
        return self.processor

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **kwargs: Any) -> None:
        if isinstance(tokenizer, ProcessorMixin):
            self.processor, self.tokenizer = tokenizer, tokenizer.tokenizer
            return
        with one_line("tokenizer" if tokenizer else "pretrained", str(tokenizer or pretrained)):
            super()._create_tokenizer(tokenizer or pretrained, None, **kwargs)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Return lm-eval's log-likelihoods of text.

        Raises:
            UsageError: For requests with images, whose log-likelihoods lm-eval does not compute.
        """
        if any(len(request.args) > 2 for request in requests):
            raise UsageError(
                f"task={requests[0].task_name}: it asks for log-likelihoods of text behind images, "
                "which lm-eval does not compute; choose a task of output_type generate_until"
            )
        return super().loglikelihood(requests, disable_tqdm)

    def _model_multimodal_generate(self, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        # Left-padded, with the attention mask that tells the pads, as for text.
        output: Tensor = super()._model_multimodal_generate(inputs, *args, **kwargs)
        self.on_rows(len(inputs["input_ids"]))
        return output
