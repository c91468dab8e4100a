"""Write the embedded data sets to disk in the layout of the Hugging Face hub.

``<org>/<dataset>/README.md`` names the parquet files of every configuration and split in its
``configs:`` header, so ``datasets.load_dataset(directory / org / dataset, name)`` needs no network.

The names of the files contain a hash of the content. The cache of ``datasets`` is keyed by the name
of a local directory and the paths in the header, not by the directory's place or the files'
content: with plain names it would return the rows of another directory that it has read before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from capmoe_eval.experiment.data_file import read_data
from capmoe_eval.experiment.datasource import EMBEDDED, DataSource, cache_directory
from capmoe_eval.zoo.synthetic.documents import Configs

_TEXTS = pa.list_(pa.string())
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_TYPES = {
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "text": pa.large_string(),
    "texts": _TEXTS,
    "choices": pa.struct([("text", _TEXTS), ("label", _TEXTS)]),
    "image": _IMAGE,
    "images": pa.list_(_IMAGE),
}
# How datasets writes down types with other names.
_FEATURES: Mapping[str, Any] = {
    "text": {"dtype": "string", "_type": "Value"},
    "texts": [{"dtype": "string", "_type": "Value"}],
    "image": {"_type": "Image"},
    "images": [{"_type": "Image"}],
}
_COLUMNS = read_data(__package__, "columns.yaml", dict[str, dict[str, str]])

#: BANKING77 in the layout of the hub.
REAL_TEXT = Path(__file__).with_name("real_text")
#: The worlds that have a ``dev`` and a ``test`` split.
WORLDS = {"miniworld": "mini-world", "pictures": "picture world"}
_OTHERS = {
    "synthetic": ("synthetic.documents", "synthetic stand-in"),
    "easy_vqa": ("easy_vqa", "easy-VQA"),
}


def ready(source: DataSource) -> DataSource:
    """Return the source with its documents in place; embedded ones are written on first use.

    Raises:
        UsageError: If it is read from a package that is not installed.
    """
    if source.name not in EMBEDDED or source.root != Path(source.name):
        return source
    return DataSource(source.name, embedded_hub(source.name))


def embedded_hub(name: str, split: str = "test") -> Path:
    """Return the directory of an embedded source; a generated one is written if it is absent.

    Args:
        name: One of ``experiment.datasource.EMBEDDED``.
        split: ``dev`` or ``test``, of one of ``WORLDS``.

    Raises:
        UsageError: If the split is unknown, or the source is a package that is not installed.
        OSError: If the cache cannot be written.
    """
    if name == "banking77":
        return REAL_TEXT
    if name in WORLDS:
        module = import_module(f"{__package__}.{name}.evaluation")
        title = f"{WORLDS[name]}, {split}"
        return cached_hub(f"{name}-{split}", module.documents(split), title=title)
    place, title = _OTHERS[name]
    return cached_hub(name, import_module(f"{__package__}.{place}").documents(), title=title)


def cached_hub(name: str, content: Mapping[str, Configs], *, title: str) -> Path:
    """Return a directory of data sets in the user's cache, written if it is absent.

    The directory is ``$XDG_CACHE_HOME`` (or ``~/.cache``) ``/capmoe_eval/<name>-<hash>``, where
    the hash covers every document and column type, so that another version of the documents has
    another directory. It is written under a temporary name and renamed, so that it is complete or
    absent even if several processes start at once.
    """
    cache = cache_directory()
    directory = cache / f"{name}-{_content_hash(content)}"
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=cache, prefix=f".{directory.name}."))
    try:
        write_documents(building, content, title=title)
        building.rename(directory)
    except OSError:
        # The directory exists if another process was first; its content is the same.
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return directory


def write_documents(directory: Path, content: Mapping[str, Configs], *, title: str) -> None:
    """Write data sets (configuration → split → rows) into a directory, in the layout of the hub.

    The bytes of the files depend only on the documents, the ``title`` of the data sets' cards and
    the version of pyarrow.
    """
    version = _content_hash(content)
    for path, configs in content.items():
        dataset, schema = directory / path, _schema(path)
        for config, splits in configs.items():
            (dataset / config).mkdir(parents=True, exist_ok=True)
            for split, rows in splits.items():
                table = pa.Table.from_pylist(list(rows), schema=schema)
                pq.write_table(table, dataset / _file(config, split, version))
        (dataset / "README.md").write_text(_card(path, configs, version, title), encoding="utf-8")


def _schema(path: str) -> pa.Schema:
    """Return the columns of a data set; ``datasets`` learns of pictures and decodes them."""
    kinds = _COLUMNS[path]
    schema = pa.schema([(column, _TYPES[kind]) for column, kind in kinds.items()])
    if not {"image", "images"} & set(kinds.values()):
        return schema
    features = {
        column: _FEATURES.get(kind, {"dtype": kind, "_type": "Value"})
        for column, kind in kinds.items()
    }
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def _file(config: str, split: str, version: str) -> str:
    return f"{config}/{split}-{version}.parquet"


def _card(path: str, configs: Configs, version: str, title: str) -> str:
    header = ["configs:"]
    counts = []
    for config, splits in configs.items():
        header += [f"- config_name: {config}", "  data_files:"]
        for split in splits:
            header += [f"  - split: {split}", f"    path: {_file(config, split, version)}"]
        rows = ", ".join(f"{split} {len(rows)}" for split, rows in splits.items())
        counts.append(f"- {config}: {rows}")
    lines = ["---", *header, "---", "", f"# {path}: {title}", "", "Rows per split:", ""]
    return "\n".join([*lines, *counts, ""])


def _content_hash(content: Mapping[str, Configs]) -> str:
    columns = {path: str(_schema(path)) for path in content}
    canonical = json.dumps([content, columns], sort_keys=True, default=_digest)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()[:16]


def _digest(stored: bytes) -> str:
    return hashlib.sha256(stored).hexdigest()
