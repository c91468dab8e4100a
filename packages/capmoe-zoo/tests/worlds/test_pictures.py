"""The forms of a question, and the categories of the sets.

That the answers are true is a property of the sets, which ``test_sets.py`` holds fixed, and of the
batches, which ``test_digests.py`` does.
"""

from __future__ import annotations

from capmoe_eval.evaluation.multimodal import scores
from hypothesis import given
from hypothesis import strategies as st

from capmoe_zoo.worlds.draw import Draw
from capmoe_zoo.worlds.pictures.evaluation import SETS
from capmoe_zoo.worlds.pictures.scene import facts, four_options, scene, supposed


@given(st.integers(0, 10**9).map(lambda seed: Draw(f"test-{seed}")))
def test_the_forms_of_a_question(draw):
    shown = scene(draw)
    phrases = {thing.phrase for thing in shown.things}
    for fact in facts(shown):
        assert len(set(fact.wrong)) >= 3
        assert fact.value not in fact.wrong
        if fact.kind == "existence":
            assert fact.value in phrases
            assert not phrases & set(fact.wrong)
        assert supposed(fact, draw, true=True) == fact.value
        assert supposed(fact, draw, true=False) in fact.wrong
        options, answer = four_options(fact, draw)
        assert len(set(options)) == 4
        assert options["ABCD".index(answer)] == fact.value


def test_the_categories_are_those_of_the_tasks():
    assert [*scores.MME["perception"], *scores.MME["cognition"]] == list(SETS["mme"])
    assert list(scores.CAPABILITIES) == list(SETS["mmbench"])
    assert len(scores.DIMENSIONS) == len(SETS["seedbench"])
