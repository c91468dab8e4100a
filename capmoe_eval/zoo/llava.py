"""Build the small LLaVA of the picture world: a CLIP tower, a projector, and an OLMoE.

The classes are those of transformers. The image processor is the one of Pillow, so that torchvision
is not needed.
"""

from collections.abc import Mapping
from typing import Any

from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaProcessor,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from capmoe_eval.zoo.sets import PICTURE_SIDE

#: Pixels of a side of a patch, which becomes one token.
PATCH_SIDE = 8
#: Patches of a side, and tokens of a picture.
PATCHES = PICTURE_SIDE // PATCH_SIDE
IMAGE_TOKENS = PATCHES**2
#: The text that stands for a picture in a prompt; the processor repeats it ``IMAGE_TOKENS`` times.
IMAGE_TOKEN = "<image>"
#: Mean and standard deviation of the brightness that pictures are normalised with, each channel.
MEAN, SPREAD = 0.5, 0.25


def llava_config(
    text: PretrainedConfig, vision: Mapping[str, Any], image_token_id: int
) -> LlavaConfig:
    """Return the configuration of a LLaVA, given that of its language model.

    ``vision`` has fields of the configuration of its CLIP tower.
    """
    tower = CLIPVisionConfig(image_size=PICTURE_SIDE, patch_size=PATCH_SIDE, **vision)
    return LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=image_token_id,
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,  # all layers of the tower; the default leaves out the last
    )


def picture_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Return a processor of texts with pictures of any size.

    Its batches have ``input_ids`` and ``attention_mask`` [rows, positions], and ``pixel_values``
    [pictures, 3, 96, 96]. ``IMAGE_TOKEN`` is added to a tokenizer that has none.
    """
    tokenizer.add_tokens(IMAGE_TOKEN, special_tokens=True)
    images = CLIPImageProcessorPil(
        size={"height": PICTURE_SIDE, "width": PICTURE_SIDE},
        do_center_crop=False,
        image_mean=[MEAN] * 3,
        image_std=[SPREAD] * 3,
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH_SIDE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # the tower's class token, which the strategy takes away
    )
