"""What the suite takes from inside transformers is there, or the version is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.seam import LM_EVAL
from capmoe_eval.wrapper.generation import _LOOPS
from capmoe_eval.wrapper.kernel import experts_call
from capmoe_eval.wrapper.seam import TRANSFORMERS, Library, Part
from capmoe_eval.wrapper.session import capacity_aware
from tests.wrapper.models import batch, make


@pytest.mark.parametrize("library", [TRANSFORMERS, LM_EVAL], ids=lambda of: of.distributions[0])
def test_the_installed_version_has_every_part(library: Library) -> None:
    library.check()
    assert library.parts


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (("json.decoder", "gone", ()), "there is no json.decoder.gone"),
        (("json.decoder", "JSONDecoder().gone", ()), "there is no json.decoder.JSONDecoder().gone"),
        (("json", "dumps", ("obj", "gone")), "dumps has no parameter gone"),
    ],
)
def test_a_version_without_a_part_is_refused(
    part: Part, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capmoe_eval.wrapper.seam.version", lambda _name: "5.99.0")
    with pytest.raises(UsageError) as caught:
        Library(("a-library",), ("5.1", "5.2"), (part,)).check()
    assert str(caught.value) == (
        f"a-library==5.99.0: {line}, so that a capacity cannot be enforced; install "
        "a-library==5.1 or 5.2"
    )


def test_every_loop_that_is_replaced_is_a_part() -> None:
    replaced = {f"{owner.__name__}.{name}" for owner, name in _LOOPS}
    assert replaced < {path for _, path, _ in TRANSFORMERS.parts}


# The experts' call.


def test_experts_that_are_called_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make("olmoe").model.layers[0].mlp.experts
    hidden, index, weights = torch.zeros(4, 8), torch.zeros(4, 2).long(), torch.zeros(4, 2)
    other = lambda self, hidden, weights, index: hidden  # noqa: E731
    monkeypatch.setattr(type(experts), "forward", other)
    call = {"hidden": hidden, "index": index, "weights": weights}
    with pytest.raises(UsageError, match=r"transformers==.* OlmoeExperts is called with hidden, "):
        experts_call(experts, (), call)


def test_a_model_may_name_the_arguments_of_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("olmoe")
    block = type(model.model.layers[0].mlp)
    stock = model(batch()).logits

    def forward(self: Any, hidden_BSH: Tensor) -> Tensor:
        rows = hidden_BSH.flatten(0, 1)
        _, weights, index = self.gate(rows)
        named = {"top_k_weights": weights, "top_k_index": index, "hidden_states": rows}
        return self.experts(**named).view_as(hidden_BSH)

    monkeypatch.setattr(block, "forward", forward)
    with capacity_aware(model, "score", gamma=1e9):
        assert torch.equal(model(batch()).logits, stock)
    with capacity_aware(model, "score", gamma=0.5) as meter:
        model(batch())
    assert meter.summary()["dropped"] > 0
