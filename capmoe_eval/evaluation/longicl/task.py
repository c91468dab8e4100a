"""The task of BANKING77 with demonstrations in its prompts, for lm-eval."""

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, DatasetDict

from capmoe_eval.evaluation.longicl.protocol import demonstrations, prompt, score, test_documents
from capmoe_eval.evaluation.tasks import YamlTask


class LongIclBanking77(YamlTask):
    """BANKING77 with the demonstrations in the prompt; the metric is ``exact_match``.

    The YAML files of this folder configure it. ``metadata.shots`` is the number of demonstrations
    per label. ``dataset_path`` may be any copy of the data, on the hub or in a directory. Its
    ``train`` and ``test`` splits have the columns ``text`` and ``label_text``.
    """

    dataset: DatasetDict

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load the data and replace it by the test documents, each with its whole prompt."""
        super().download(dataset_kwargs, **kwargs)
        examples = demonstrations(self.dataset["train"], self.config.metadata["shots"])
        documents = [
            {
                "prompt": prompt(examples, row["text"]),
                "text": row["text"],
                "label_text": row["label_text"],
            }
            for row in test_documents(self.dataset["test"])
        ]
        self.dataset = DatasetDict({"test": Dataset.from_list(documents)})

    def process_results(self, doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
        """Return the score of the one continuation in ``results``."""
        return {"exact_match": float(score(results[0], doc["label_text"]))}
