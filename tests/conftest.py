from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before any library reads them: what tests make stays out of the user's caches, and nothing waits
# for a hub that tests must not need. The workers of pytest-xdist share what one of them has made.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="capmoe-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TQDM_DISABLE", "1")

import pytest

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
    """Tiny tensors gain nothing from threads, and on busy cores the threads wait for each other.

    ``OMP_NUM_THREADS`` asks for another number.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def hub() -> Path:
    """The evaluation sets of the mini-world in hub layout."""
    from capmoe_eval.zoo.hub import embedded_hub

    return embedded_hub("miniworld")


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
