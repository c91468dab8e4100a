"""Which settings a mutation concerns, and the worlds in which some can be seen."""

from __future__ import annotations

import dataclasses

from tests.wrapper.mutations.settings import Setting


def everywhere(_setting: Setting) -> bool:
    return True


def capped(setting: Setting) -> bool:
    """A number of pairs is bounded."""
    return setting.method.bounds_pairs


def with_capacity(setting: Setting) -> bool:
    return setting.method.unit is not None


def per_expert(setting: Setting) -> bool:
    return capped(setting) and setting.method.unit == "expert"


def per_device(setting: Setting) -> bool:
    return setting.method.unit == "device"


def in_blocks(setting: Setting) -> bool:
    return per_device(setting) and not setting.method.is_placed


def placed(setting: Setting) -> bool:
    return setting.method.is_placed


def by_score(setting: Setting) -> bool:
    return capped(setting) and setting.method.name not in ("order", "reverse_order", "random")


def by_place(setting: Setting) -> bool:
    return setting.method.name in ("order", "reverse_order")


def named(*names: str):
    """The method has one of these names."""
    return lambda setting: setting.method.name in names


def _candidate_rule(setting: Setting) -> str:
    """Return what is added to a token's top-k as a candidate, or topk."""
    return getattr(setting.method, "candidates", "topk")


def expands(setting: Setting) -> bool:
    return _candidate_rule(setting) != "topk"


def candidates(*rules: str):
    """The added candidates are chosen by one of these rules."""
    return lambda setting: _candidate_rule(setting) in rules


def adds(setting: Setting) -> bool:
    """Pairs may be added beside a token's own."""
    reroutes = setting.method.name in ("token_reroute", "oea", "xshare", "macs")
    return expands(setting) or reroutes


def chooses_a_set(setting: Setting) -> bool:
    return setting.method.name in ("oea", "xshare")


def has_modalities(setting: Setting) -> bool:
    return setting.method.modality != "uniform"


def text_alone(setting: Setting) -> bool:
    return not setting.has_images


def both(*conditions):
    return lambda setting: all(condition(setting) for condition in conditions)


def neither(*conditions):
    return lambda setting: not any(condition(setting) for condition in conditions)


# Worlds.


def unchanged(setting: Setting) -> Setting:
    return setting


def tied(setting: Setting) -> Setting:
    """Return a model whose last router gives all pairs the same score."""
    return dataclasses.replace(setting, tied=True)


def of(family: str, **knobs):
    """Make a world of another family of models, under other knobs of the method."""
    return lambda setting: dataclasses.replace(setting, family=family).under(**knobs)


def under(**knobs):
    """Make a world of other knobs of the method."""
    return lambda setting: setting.under(**knobs)


normalised = of("olmoe_normalised")
normalised_after = of("olmoe_normalised", renormalize="after")
grouped = of("deepseek_v3")
