from __future__ import annotations

import functools
import gc
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Before any library reads them: what tests make stays out of the user's caches, and nothing waits
# for a hub that tests must not need. The workers of pytest-xdist share what one of them has made.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="capmoe-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TQDM_DISABLE", "1")

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]


def pytest_collection_finish() -> None:
    """Spare the garbage collector what is imported, which stays: half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def datasets_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep what datasets prepares out of the user's cache."""
    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and on busy cores the threads wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def read_once() -> Iterator[None]:
    """Share what stays among the tests of a process, and parse cards of data sets by libyaml."""
    from hydra._internal.config_repository import ConfigRepository
    from lm_eval.tasks import manager
    from lm_eval.tasks._index import TaskIndex

    from capmoe_eval.evaluation import calibration
    from capmoe_eval.evaluation.tasks import TaskLibrary

    load = ConfigRepository.load_config  # of a file of conf/
    known: dict[object, bytes] = {}

    def load_config(repository: ConfigRepository, config_path: str) -> Any:
        key = (config_path, *(str(source.path) for source in repository.get_sources()))
        if key not in known:
            known[key] = pickle.dumps(load(repository, config_path))
        return pickle.loads(known[key])

    index = functools.cache(lambda folder: TaskIndex().build([folder]))
    shared: dict[Any, Any] = {}
    new = TaskLibrary.__init__

    class Index(TaskIndex):
        @staticmethod
        def build(paths: Iterable[Path], **_: object) -> dict[str, Any]:
            return {name: entry for folder in paths for name, entry in index(folder).items()}

    class Own(TaskLibrary):
        """A library of a calibration, which changes the tasks that it builds."""

        __init__ = new

    def sharing(library: TaskLibrary) -> None:
        new(library)
        library._built = shared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigRepository, "load_config", load_config)
        patch.setattr(manager, "TaskIndex", Index)
        patch.setattr(TaskLibrary, "__init__", sharing)
        patch.setattr(calibration, "TaskLibrary", Own)
        # datasets parses the card of a data set for each of its parts: MMLU's 57 times.
        patch.setattr(yaml, "safe_load", functools.partial(yaml.load, Loader=yaml.CSafeLoader))
        yield


@pytest.fixture(scope="session")
def hub() -> Path:
    """The synthetic documents in hub layout."""
    from capmoe_eval.zoo.synthetic.hub import synthetic_hub

    return synthetic_hub()


@pytest.fixture(scope="session")
def real_hub() -> Path:
    """The real evaluation sets in hub layout."""
    root = Path(os.environ.get("CAPMOE_DATA_ROOT") or REPOSITORY.parent / "shared/data/hub")
    if not root.is_dir():
        pytest.skip(f"no real evaluation sets at {root} (set CAPMOE_DATA_ROOT)")
    return root


@pytest.fixture(scope="session")
def real_tokenizer(real_hub: Path) -> Path:
    """OLMoE's tokenizer."""
    directory = real_hub.parent / "tokenizers/olmoe"
    if not (directory / "tokenizer.json").is_file():
        pytest.skip(f"no OLMoE tokenizer at {directory}")
    return directory
