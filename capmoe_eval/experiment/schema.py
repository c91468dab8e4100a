"""The rules of the configuration's keys, as one table.

The rules of a cell's parts are the cell's own, so that records are held to the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from capmoe_eval.checks import CAPACITY, FLAG, NAME, TEXT, Check, choice, whole
from capmoe_eval.errors import UsageError, shown
from capmoe_eval.experiment.cell import CHECKS, MODEL_CHECKS, TASK_CHECKS, TASK_FIELDS
from capmoe_eval.experiment.datasource import EMBEDDED, HUB
from capmoe_eval.experiment.processes import PARALLEL
from capmoe_eval.routing.method import KNOBS, METHODS

DTYPES: Final = ("float32", "bfloat16", "float16")
ATTENTION: Final = ("sdpa", "eager", "flash_attention_2")
_SHARD: Final = re.compile(r"([1-9]\d*)/([1-9]\d*)")

_DTYPE = choice(*DTYPES)
_THREADS = whole(1, 1024).or_null("null for torch's own choice")
_DEVICE_MAP = TEXT.or_null("null for one device")
_ROOT = TEXT.or_null("null for the hub")
_NULL = "null for none"
_GAMMA = CAPACITY.or_null("null where the method has none")
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

_MODEL: Final[dict[str, Check]] = {
    **MODEL_CHECKS,
    "title": TEXT,
    "note": TEXT.or_null(_NULL),
    "profile": NAME,
    "dtype": _DTYPE,
    "device_map": _DEVICE_MAP,
    "threads": _THREADS,
    "ep_size": KNOBS["ep_size"],
    "gamma": _GAMMA,
    "batch_size": CHECKS["batch_size"],
    "data_root": _ROOT,
}
_TASK: Final[dict[str, Check]] = {
    **{field: TASK_CHECKS[field] for field in TASK_FIELDS},
    "title": TEXT,
    "batch_size": CHECKS["batch_size"].or_null("null for that of the configuration"),
}
SCHEMA: Final[dict[str, Check | dict[str, Check]]] = {
    "method": choice(*METHODS),
    "gamma": _GAMMA,
    **KNOBS,
    **{key: CHECKS[key] for key in ("batch_size", "shuffle", "limit", "eval_seed")},
    "data": {"root": _ROOT, "name": _DATA_NAME.or_null("null for the directory's own")},
    "dtype": _DTYPE,
    "attention": choice(*ATTENTION).or_null("null for the model's own"),
    "device": TEXT,
    "threads": _THREADS,
    "device_map": _DEVICE_MAP,
    "parallel": choice(*PARALLEL),
    "results_dir": TEXT,
    "overwrite": FLAG,
    "shard": SHARD,
    "model": _MODEL,
    "profile": {"name": NAME},
}
"""Key → rule, or the rules of its fields. ``tasks`` has the names of tasks for keys."""


def fields(section: str) -> tuple[str, ...]:
    """Return the names of the fields of a section, such as ``model``; of a task for ``tasks``."""
    rules = _TASK if section == "tasks" else SCHEMA.get(section)
    return tuple(rules) if isinstance(rules, dict) else ()


def check_key(key: str, value: object) -> None:
    """Refuse a value that a key of the configuration cannot have.

    A field that is not there is not complained of: what needs it names it.

    Raises:
        UsageError: Naming the key, the value and the rule.
    """
    if key == "tasks":
        for name, task in _section("tasks", value, "obqa").items():
            NAME("tasks", name)
            _check_fields(f"tasks.{name}", _section(f"tasks.{name}", task, "lm_eval"), _TASK)
        return
    rule = SCHEMA.get(key, {})
    if isinstance(rule, Check):
        rule(key, value)
    elif rule:
        _check_fields(key, _section(key, value, next(iter(rule))), rule)


def _section(name: str, value: object, example: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise UsageError(
            f"{name}={shown(value)}: must have at least one field, such as {name}.{example}"
            if name != "tasks"
            else f"tasks={shown(value)}: must name at least one task, for example tasks=[{example}]"
        )
    return value


def _check_fields(name: str, section: Mapping[str, Any], rules: Mapping[str, Check]) -> None:
    for field, rule in rules.items():
        if field in section:
            rule(f"{name}.{field}", section[field])
