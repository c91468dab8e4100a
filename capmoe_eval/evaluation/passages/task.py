"""Bits per byte of held-out passages, as tasks of lm-eval that score whole texts."""

from __future__ import annotations

from typing import Any, Final

from datasets import Dataset, DatasetDict

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.passages.text import cut, is_held_out
from capmoe_eval.evaluation.tasks import YamlTask

HELD_OUT: Final = 8
"""One of so many passages of the train split is held out, as packages/capmoe-zoo trains."""


class Passages(YamlTask):
    """Passages of BoolQ in documents of one length; the metric is ``bits_per_byte``.

    The YAML files of this folder configure it. ``metadata.bytes`` is the length of a document. The
    documents of the ``train`` split are cut from its held-out passages, without those that the
    ``validation`` split has, too.
    """

    dataset: DatasetDict

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load the data and replace its rows by documents.

        Raises:
            UsageError: If there is less text than one document.
        """
        super().download(dataset_kwargs, **kwargs)
        size = self.config.metadata["bytes"]
        test = self.dataset["validation"]["passage"]
        of_test = set(test)
        dev = [p for p in self.dataset["train"]["passage"] if is_held_out(p, HELD_OUT)]
        passages = {"train": [p for p in dev if p not in of_test], "validation": test}
        self.dataset = DatasetDict(
            {
                split: Dataset.from_dict({"text": cut(texts, size)})
                for split, texts in passages.items()
            }
        )
        if not len(self.dataset[self.config.test_split]):
            raise UsageError(
                f"task={self.config.task}: the {self.config.test_split} split has no {size} bytes "
                "of passages; choose another data.root, or a task of shorter documents"
            )
