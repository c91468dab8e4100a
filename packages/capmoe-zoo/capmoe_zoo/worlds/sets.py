"""Write the evaluation sets that the suite ships; ``capmoe_eval.zoo.sets`` reads them."""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from capmoe_eval.experiment.files import whole_file
from capmoe_eval.zoo.sets import SETS, WORLDS, Configs

from capmoe_zoo.worlds.miniworld import evaluation as miniworld
from capmoe_zoo.worlds.pictures import evaluation as pictures

_SCHEMA = pa.schema([(name, pa.string()) for name in ("dataset", "config", "split", "row")])
_PICTURES = pa.schema(
    [*_SCHEMA, ("pixels", pa.binary()), ("noise", pa.int64()), ("light", pa.int64())]
)


def write() -> None:
    """Write the files of all worlds and splits into the suite."""
    for world, split in itertools.product(WORLDS, ("dev", "test")):
        with whole_file(SETS / f"{world}-{split}.parquet") as file:
            content = table(world, split)
            pq.write_table(content, file, compression="brotli", compression_level=11)


def table(world: str, split: str) -> pa.Table:
    """Return the documents of a world as they are shipped."""
    source, schema = (pictures, _PICTURES) if world == "pictures" else (miniworld, _SCHEMA)
    return pa.Table.from_pylist(list(_rows(source.documents(split))), schema=schema)


def _rows(sets: Mapping[str, Configs]) -> Iterator[dict[str, Any]]:
    before = None
    for dataset, configs in sets.items():
        for config, splits in configs.items():
            for split, rows in splits.items():
                for row in rows:
                    stored = {"dataset": dataset, "config": config, "split": split}
                    content = dict(row)
                    if "image" in row:
                        is_listed = isinstance(row["image"], list)
                        drawn = row["image"][0] if is_listed else row["image"]
                        content["image"] = [] if is_listed else None
                        if drawn is not before:
                            stored |= drawn
                        before = drawn
                    yield stored | {"row": json.dumps(content, ensure_ascii=False)}
