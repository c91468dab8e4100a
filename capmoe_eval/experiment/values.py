"""Types of the values that users write, each with its rule, as pydantic checks them."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias, get_args

from annotated_types import Predicate
from pydantic import Field

from capmoe_eval.experiment.datasource import EMBEDDED, HUB, is_embedded
from capmoe_eval.routing.knobs import Count, says

_LONGEST_NAME: Final = 100  # bytes; a file system takes 255 for a name, and the suite adds endings


def _is_text(text: str) -> bool:
    return bool(text.strip()) and text.isprintable()


def _is_name(text: str) -> bool:
    return (
        _is_text(text)
        and text == text.strip()
        and not text.startswith(".")
        and not set(text) & set("/\\")
        and len(text.encode("utf-8", "replace")) <= _LONGEST_NAME
    )


def _is_shard(text: str) -> bool:
    number, _, count = text.partition("/")
    return int(number) <= int(count)


def _is_free(name: str) -> bool:
    return name != HUB and not is_embedded(name)


_NAME = (
    "text that becomes a name in a path: without / or \\, without a leading dot, of at most "
    f"{_LONGEST_NAME} bytes, such as my_name"
)

Text: TypeAlias = Annotated[
    str,
    Predicate(_is_text),
    says(
        "text in one line; put what looks like a number, true or null into quotes within quotes, "
        "\"'42'\""
    ),
]
Name: TypeAlias = Annotated[str, Predicate(_is_name), says(_NAME)]
"""Every name that becomes part of a path."""
Documents: TypeAlias = Annotated[Name, says(f"{_NAME}; call a local root data.name=NAME")]
LocalName: TypeAlias = Annotated[
    Name,
    Predicate(_is_free),
    says(f"{_NAME}, and not {', '.join((HUB, *EMBEDDED))}, which stand for other documents"),
]

BatchSize: TypeAlias = Count | Annotated[Literal["auto"], says("auto for the baseline")]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
DTYPES: Final[tuple[str, ...]] = get_args(Dtype)
Attention: TypeAlias = Literal["sdpa", "eager", "flash_attention_2"]
Backend: TypeAlias = Literal["transformers", "vllm"]
NumpySeed: TypeAlias = Annotated[int, Field(ge=0, le=2**32 - 1)]
Threads: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
_DEVICE: Final = "(cpu|cuda|mps|xpu|npu)(:[0-9]{1,3})?"
Device: TypeAlias = Annotated[
    str,
    Field(pattern=f"^(auto|{_DEVICE})$"),
    says("auto or a device: cpu, cuda, mps, xpu or npu, or one of several, such as cuda:1"),
]
DeviceMap: TypeAlias = Annotated[
    str,
    Field(pattern=f"^(auto|balanced(_low_0)?|sequential|{_DEVICE})$"),
    says("auto, balanced, balanced_low_0, sequential or a device such as cuda:1"),
]
Shard: TypeAlias = Annotated[
    str,
    Field(pattern=r"^[1-9][0-9]{0,8}/[1-9][0-9]{0,8}$"),
    Predicate(_is_shard),
    says("i/n with 1 ≤ i ≤ n, for example shard=1/2"),
]

Own: TypeAlias = Annotated[None, Field(description="null for the model's own")]
EveryDocument: TypeAlias = Annotated[None, Field(description="null for all")]
