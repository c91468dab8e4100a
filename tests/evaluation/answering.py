"""A model of lm-eval that gives the answers it is told."""

from collections.abc import Callable
from typing import Any

from lm_eval.api.model import LM


class Answering(LM):
    """Continues each prompt by what ``answer`` says to its document, and notes its requests."""

    MULTIMODAL = True

    def __init__(self, answer: Callable[[Any], str]) -> None:
        super().__init__()
        self.answer = answer
        self.requests: list[tuple[Any, ...]] = []

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        self.requests += [request.args for request in requests]
        return [self.answer(request.doc) for request in requests]

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood
