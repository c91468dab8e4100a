"""The sets have the form of MME, MMBench and SEED-Bench, and most of a picture is redundant."""

from capmoe_eval.evaluation.multimodal import scores
from capmoe_eval.zoo.sets import documents

from capmoe_zoo.worlds.pictures.evaluation import (
    SETS,
)


def rows(split="test"):
    sets = documents("pictures", split)
    return (
        sets["lmms-lab/MME"]["default"]["test"],
        sets["lmms-lab/MMBench"]["en"]["dev"],
        sets["lmms-lab/SEED-Bench"]["default"]["test"],
    )


def test_the_categories_are_those_of_the_tasks():
    assert [*scores.MME["perception"], *scores.MME["cognition"]] == list(SETS.mme)
    assert list(scores.CAPABILITIES) == list(SETS.mmbench)
    assert len(scores.DIMENSIONS) == len(SETS.seedbench)
