"""Let transformers' auto classes load MolmoE from the hub's own files, none of whose code runs."""

from __future__ import annotations

import functools

from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.utils import is_vision_available

from capmoe_eval.wrapper.molmoe.configuration import MolmoeConfig
from capmoe_eval.wrapper.molmoe.model import CHECKPOINT_NAMES, MolmoeForConditionalGeneration
from capmoe_eval.wrapper.molmoe.processor import MolmoImageProcessor, MolmoProcessor


@functools.cache
def register() -> None:
    """Register MolmoE under the hub's ``model_type``, ``molmo``."""
    AutoConfig.register(MolmoeConfig.model_type, MolmoeConfig)
    AutoModelForImageTextToText.register(MolmoeConfig, MolmoeForConditionalGeneration)
    if is_vision_available():  # else no image can be read
        AutoImageProcessor.register(MolmoeConfig, slow_image_processor_class=MolmoImageProcessor)
        AutoProcessor.register(MolmoeConfig, MolmoProcessor)
    register_checkpoint_conversion_mapping(MolmoeConfig.model_type, CHECKPOINT_NAMES)
