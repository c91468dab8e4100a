"""The JSON schema of a record's file, ``docs/record.schema.json``."""

import json
from typing import Any, Final

from pydantic import TypeAdapter

from capmoe_eval.experiment.cell import CELL_FIELDS, OMITTED, ModelId, TaskId
from capmoe_eval.experiment.record import SCHEMA, Whole
from pages import DOCS

FILE: Final = DOCS / "record.schema.json"


def text() -> str:
    """Return the content of the schema's file."""
    part = Whole.model_json_schema()
    definitions = part.pop("$defs")
    kinds = {"model": ModelId, "task": TaskId}
    cell = {name: TypeAdapter(kind).json_schema() for name, kind in kinds.items()}
    cell["method"] = {"type": "object", "required": ["method"]}
    part["properties"]["schema"] = {"const": SCHEMA}
    part["properties"]["cell"] = {
        "type": "object",
        "properties": cell,
        "required": [*cell, *(name for name in CELL_FIELDS if name not in OMITTED)],
    }
    part["required"] = sorted([*part["required"], "schema", "checksum"])
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A record of capmoe_eval",
        "type": "object",
        "properties": {"capmoe": part},
        "required": ["capmoe"],
        "$defs": definitions,
    }
    return json.dumps(schema, indent=1) + "\n"
