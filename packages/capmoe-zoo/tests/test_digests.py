"""What a recipe reads is fixed to the byte: its tokenizer and its batches, by their digests.

The evaluation sets are compared with the shipped files by ``worlds/test_sets.py``. So these pin all
that the trained models depend on; whoever changes a digest changes every number of the zoo.
"""

from __future__ import annotations

import hashlib

import pytest
from capmoe_eval.zoo import WEIGHTS
from capmoe_eval.zoo.tokenizer import miniworld_tokenizer

from capmoe_zoo.embedded.miniworld import train_tokenizer
from capmoe_zoo.embedded.train import data_of, recipe
from capmoe_zoo.worlds.miniworld.world import world

STEPS = 20
BATCHES = {
    "olmoe": ("de4eaa01a6330c9c", "4a39d5fd0f65e212", "01a74fb443e67dfc", "3c0ba1367f867e74"),
    "banking77": ("ae01efe72d3b6cff", "eb17a49ce5baf887", "2784b09bfa9fc801", "6e731c4267f24fe9"),
    "icl_olmoe": ("c8853754bd312575", "f389bc530e36ef5a", "7c7807a9c72bd81a", "aedce08bc227cc8f"),
    "llava_olmoe": ("20414ad64fa68414", "0de8776d23831903", "c8a9568aaa49e400", "737c06e8864a0579"),
}
"""Of each kind of data the digests of the batches 0, 4 (long documents), 9 and 19 of 20."""


@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_those_that_the_models_were_trained_on(name: str) -> None:
    tokenizer, batches = data_of(recipe(name), STEPS)
    digests = []
    for step in (0, 4, 9, 19):
        digest = hashlib.sha256()
        for field, tensor in sorted(vars(batches(step)).items()):
            if tensor is not None:
                digest.update(f"{field} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.numpy().tobytes())
        digests.append(digest.hexdigest()[:16])
    assert tuple(digests) == BATCHES[name]
    file = WEIGHTS / name / "tokenizer.json"
    if file.is_file():
        assert file.read_text(encoding="utf-8") == tokenizer.backend_tokenizer.to_str(pretty=True)


@pytest.mark.slow
def test_the_shipped_tokenizer_is_trained_on_the_corpus() -> None:
    shipped = miniworld_tokenizer().backend_tokenizer
    assert train_tokenizer(world()).get_vocab() == shipped.get_vocab()
