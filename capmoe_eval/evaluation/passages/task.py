"""Bits per byte of held-out passages, as tasks of lm-eval that score whole texts.

One rule for every length: each passage once, in the order of the data set, joined by blank lines;
that text is cut before a word into documents of at most so many bytes. The rest is left out.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, Final

from datasets import Dataset, DatasetDict

from capmoe_eval.errors import UsageError
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


def is_held_out(document: str, modulus: int) -> bool:
    """Return whether a document is held out of training; equal documents are on the same side.

    By its hash one of ``modulus`` documents is, and none of 0.
    """
    digest = hashlib.sha256(document.encode()).digest()
    return modulus > 0 and int.from_bytes(digest[:8], "big") % modulus == 0


def cut(passages: Iterable[str], size: int) -> list[str]:
    """Return the documents of at most ``size`` bytes of UTF-8, each ending before a space.

    Raises:
        ValueError: A stretch of that size has no space.
    """
    text = "\n\n".join(dict.fromkeys(passages)).encode()
    documents, begin = [], 0
    while len(text) - begin > size:
        end = text.rindex(b" ", begin + 1, begin + size + 1)
        documents.append(text[begin:end].decode())
        begin = end + 1
    return documents
