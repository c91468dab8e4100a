import os
from pathlib import Path

import datasets
import pytest
import torch

from capmoe_eval.tiny import write_hub

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path_factory, monkeypatch):
    """Keep what datasets prepares out of the user's cache."""
    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Tiny tensors gain nothing from threads, and on busy cores the threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hub")
    write_hub(directory)
    return directory


@pytest.fixture(scope="session")
def real_hub():
    root = Path(os.environ.get("CAPMOE_DATA_ROOT") or REPOSITORY.parent / "shared/data/hub")
    if not root.is_dir():
        pytest.skip(f"no real evaluation sets at {root} (set CAPMOE_DATA_ROOT)")
    return root
