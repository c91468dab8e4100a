"""Write the embedded data sets to disk in the layout of the Hugging Face hub.

``<org>/<dataset>/README.md`` names the parquet files of every configuration and split in its
``configs:`` header, so ``datasets.load_dataset(directory / org / dataset, name)`` needs no network.

The names of the files contain a hash of the content. The cache of ``datasets`` is keyed by the name
of a local directory and the paths in the header, not by the directory's place or the files'
content. With plain names it would return the rows of another directory that it has read before.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capmoe_eval.experiment.datasource import DataSource, cache_directory, is_embedded
from capmoe_eval.experiment.files import read_data
from capmoe_eval.experiment.names import split_world
from capmoe_eval.lazy import pa
from capmoe_eval.zoo.sets import WORLDS, Configs, documents, generator

# How datasets writes down types with other names.
_FEATURES: Mapping[str, Any] = {
    "text": {"dtype": "string", "_type": "Value"},
    "texts": [{"dtype": "string", "_type": "Value"}],
    "image": {"_type": "Image"},
    "images": [{"_type": "Image"}],
}
_COLUMNS = read_data(__package__, "columns.yaml", dict[str, dict[str, str]])

#: The package; another version of its files makes other documents.
SOURCES = Path(__file__).parent
#: BANKING77 in the layout of the hub.
REAL_TEXT = SOURCES / "real_text"


def ready(source: DataSource) -> DataSource:
    """Return the source with its documents in place; embedded ones are written on first use.

    Raises:
        UsageError: If it is read from a package that is not installed.
    """
    if not is_embedded(source.name) or source.root != Path(source.name):
        return source
    return DataSource(source.name, embedded_hub(source.name), source.file, source.file_hash)


def embedded_hub(name: str, split: str = "test") -> Path:
    """Return the directory of an embedded source, which is written if it is absent.

    It is ``$XDG_CACHE_HOME`` (or ``~/.cache``) ``/capmoe_eval/<name>-<hash>``, and the hash covers
    the files that the documents come from. So documents are written once for a version of these
    files, not once for a process. The directory is written under a temporary name and renamed: it
    is complete or absent even if several processes start at once.

    Args:
        name: That of a source for which ``experiment.datasource.is_embedded`` is true.
        split: ``dev`` or ``test``, of one of ``WORLDS``.

    Raises:
        UsageError: If the split is unknown, or the source is a package that is not installed.
        OSError: If the cache cannot be written.
    """
    if name == "banking77":
        return REAL_TEXT
    (base, seed), cache = split_world(name), cache_directory()
    is_world = base in WORLDS
    folders = [SOURCES]
    if seed is not None:
        folders.append(Path(inspect.getfile(generator(name))).parent)
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*")):
        if path.suffix in (".py", ".yaml", ".parquet"):
            digest.update(path.read_bytes())
    directory = cache / f"{name}{f'-{split}' if is_world else ''}-{digest.hexdigest()[:16]}"
    if directory.is_dir():
        return directory
    content = documents(name, split)
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=cache, prefix=f".{directory.name}."))
    try:
        title = f"{WORLDS[base]}, {split}" if is_world else "easy-VQA"
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
    import pyarrow.parquet as pq

    canonical = json.dumps(
        [content, {path: str(_schema(path)) for path in content}],
        sort_keys=True,
        default=lambda stored: hashlib.sha256(stored).hexdigest(),  # the bytes of a picture
    )
    version = hashlib.sha256(canonical.encode()).hexdigest()[:16]
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
    texts, image = pa.list_(pa.string()), pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    types = {
        "int16": pa.int16(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "text": pa.large_string(),
        "texts": texts,
        "choices": pa.struct([("text", texts), ("label", texts)]),
        "image": image,
        "images": pa.list_(image),
    }
    kinds = _COLUMNS[path]
    schema = pa.schema([(column, types[kind]) for column, kind in kinds.items()])
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
