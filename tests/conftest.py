import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before any library reads them: what tests make stays out of the user's caches, and nothing waits
# for a hub that tests must not need. The workers of pytest-xdist share what one of them has made.
if not os.environ.get("PYTEST_XDIST_WORKER"):
    _CACHE, _OWNER = tempfile.mkdtemp(prefix="capmoe-tests-"), os.getpid()
    os.environ["XDG_CACHE_HOME"] = _CACHE
    # A fork that ends removes nothing.
    atexit.register(lambda: os.getpid() == _OWNER and shutil.rmtree(_CACHE, ignore_errors=True))
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


class Shell:
    """Runs a command line in this process, from an empty directory."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cwd: Path
    ) -> None:
        self._monkeypatch, self._capsys, self.cwd = monkeypatch, capsys, cwd
        monkeypatch.chdir(cwd)
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def __call__(self, *words: str, main: object = None) -> tuple[int, str, str]:
        """Return the status, and what is printed on standard output and standard error."""
        from capmoe_eval.__main__ import main as program_main

        self._monkeypatch.setattr(sys, "argv", ["capmoe-eval", *words])
        with pytest.raises(SystemExit) as done:
            (main or program_main)(words)  # type: ignore[operator]
        out, err = self._capsys.readouterr()
        return int(done.value.code or 0), out, err


@pytest.fixture
def shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Shell:
    """A command line in an empty directory."""
    return Shell(monkeypatch, capsys, tmp_path)


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
