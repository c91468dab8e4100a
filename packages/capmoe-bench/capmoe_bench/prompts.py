"""Prompts of a model of ``make real``: customer queries of BANKING77."""

from pathlib import Path

from capmoe_eval.errors import UsageError
from capmoe_eval.experiment.cell import checkpoint
from capmoe_eval.lazy import pd


def real_checkpoint(option: str, name: str) -> Path:
    """Return the directory of a model such as ``real:smollm2_moe``.

    Raises:
        UsageError: If the directory has no model; the message names the option.
    """
    directory = Path(checkpoint(name))
    if not (directory / "config.json").is_file():
        raise UsageError(f"{option}={name}: no model in {directory}; `make real` writes it")
    return directory


def query_prompts(directory: Path, count: int, length: int) -> list[list[int]]:
    """Return prompts of ``length`` tokens of a checkpoint's tokenizer, cut from joined queries."""
    from capmoe_eval.zoo.hub import REAL_TEXT
    from transformers import AutoTokenizer

    (train,) = REAL_TEXT.rglob("train.parquet")
    text = " ".join(pd.read_parquet(train)["text"])
    tokens: list[int] = AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
    return [tokens[first : first + length] for first in range(0, count * length, length)]
