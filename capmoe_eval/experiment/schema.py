"""The rules of the configuration's keys, as one table.

The rules of a cell's parts are the cell's own, so that records are held to the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from capmoe_eval.errors import (
    CAPACITY,
    FLAG,
    LARGEST,
    NAME,
    TEXT,
    Check,
    UsageError,
    bad_choice,
    choice,
    shown,
    whole,
)
from capmoe_eval.experiment.cell import BERTSCORE, TASK_FIELDS, Cell, ModelId, TaskId, checks
from capmoe_eval.experiment.datasource import EMBEDDED, HUB
from capmoe_eval.routing.knobs import GAMMA, KNOBS
from capmoe_eval.routing.method import METHODS

DTYPES: Final = ("float32", "bfloat16", "float16")
CALIBRATE: Final = "calibrate"
_SHARD: Final = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})")

_DATA_NAME = Check(
    f"{NAME.rule}, and not {', '.join((HUB, *EMBEDDED))}, which stand for other documents",
    lambda value: NAME.holds(value) and value not in (HUB, *EMBEDDED),
)


def _is_shard(value: object) -> bool:
    parts = _SHARD.fullmatch(value) if isinstance(value, str) else None
    return parts is not None and int(parts[1]) <= int(parts[2])


SHARD: Final = Check("must be i/n with 1 ≤ i ≤ n, for example shard=1/2", _is_shard).or_null(
    "null for all"
)

_DEVICE_MAP: Final = Check(
    "must be auto, balanced, balanced_low_0, sequential or a device such as cuda:1",
    lambda value: (
        isinstance(value, str)
        and bool(
            re.fullmatch(
                r"auto|balanced(_low_0)?|sequential|(cpu|cuda|mps|xpu|npu)(:[0-9]{1,3})?", value
            )
        )
    ),
)

_SEEDS: Final = Check(
    "must be a list of seeds, for example [0,1,2]",
    lambda value: isinstance(value, list) and all(map(KNOBS["seed"].holds, value)),
)

_MODEL: Final[dict[str, Check]] = {
    **checks(ModelId),
    "title": TEXT,
    "note": TEXT.or_null("null for none"),
    "profile": NAME,
    "dtype": choice(*DTYPES),
    "device_map": _DEVICE_MAP.or_null("null for one device"),
    "threads": whole(1, 1024).or_null("null for torch's own choice"),
    "ep_size": KNOBS["ep_size"],
    "gamma": CAPACITY.or_null("null where the method has none"),
    "batch_size": checks(Cell)["batch_size"],
    "data_root": TEXT.or_null("null for the hub"),
}
_TASK: Final[dict[str, Check]] = {
    **{field: checks(TaskId)[field] for field in TASK_FIELDS},
    "title": TEXT,
    "batch_size": checks(Cell)["batch_size"].or_null("null for that of the configuration"),
    "data_root": TEXT.or_null("null for that of the configuration"),
}
TASK_DEFAULTS: Final = {"images": False, "batch_size": None, "data_root": None, **BERTSCORE}
"""The fields that a task need not have."""
SCHEMA: Final[dict[str, Check | dict[str, Check]]] = {
    "method": choice(*METHODS),
    **KNOBS,
    **{key: checks(Cell)[key] for key in ("shuffle", "limit", "eval_seed")},
    # The model's, unless something else is said.
    "gamma": GAMMA.or_null("null where the method has none"),
    **{key: _MODEL[key] for key in ("batch_size", "dtype", "threads", "device_map")},
    "data": {
        "root": _MODEL["data_root"],
        "name": _DATA_NAME.or_null("null for the directory's own"),
    },
    "attention": choice("sdpa", "eager", "flash_attention_2").or_null("null for the model's own"),
    "device": TEXT,
    "parallel": choice("none", "ep"),
    "results_dir": TEXT,
    "overwrite": FLAG,
    "plan": Check(
        f"must be false, true or {CALIBRATE}",
        lambda value: isinstance(value, bool) or value == CALIBRATE,
    ),
    "allow_code_execution": FLAG,
    "save_trace": TEXT.or_null("null for none"),
    "trace_tokens": whole(1, LARGEST),
    "shard": SHARD,
    "model": _MODEL,
    "profile": {"name": NAME, "seeds": _SEEDS},
    "variant": {},
}
"""Key → rule, or the rules of its fields. ``tasks`` has the names of tasks for keys."""


def fields(section: str) -> tuple[str, ...]:
    """Return the names of the fields of a section, such as ``model``; of a task for ``tasks``."""
    rules = _TASK if section == "tasks" else SCHEMA.get(section)
    return tuple(rules) if isinstance(rules, dict) else ()


def check_key(key: str, value: object) -> None:
    """Refuse a value that a key of the configuration cannot have, by a UsageError with the rule.

    A field that is not there is not complained of: what needs it names it.
    """
    if key == "tasks":
        if not isinstance(value, Mapping) or not value:
            raise UsageError(
                f"tasks={shown(value)}: must name at least one task, for example tasks=[obqa]"
            )
        for name, task in value.items():
            NAME("tasks", name)
            _check_section(f"tasks.{name}", task, _TASK)
    elif key not in SCHEMA:  # ``+gama=1`` forces it on Hydra
        raise bad_choice("key", key, sorted((*SCHEMA, "tasks")))
    elif isinstance(rule := SCHEMA[key], Check):
        rule(key, value)
    elif rule:
        _check_section(key, value, rule)


def _check_section(name: str, section: object, rules: Mapping[str, Check]) -> None:
    if not isinstance(section, Mapping) or not section:
        example = f"{name}.{next(iter(rules))}"
        raise UsageError(
            f"{name}={shown(section)}: must have at least one field, such as {example}"
        )
    for field in section:
        if field not in rules and name != "profile":  # a profile has lists of its own
            raise bad_choice(name, field, rules)
    for field, rule in rules.items():
        if field in section:
            rule(f"{name}.{field}", section[field])
