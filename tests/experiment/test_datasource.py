"""The fingerprint of a dataset: of the documents that are read, wherever they lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from capmoe_eval.experiment import datasource
from capmoe_eval.experiment.datasource import DataSource


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash anew each time: within one process a hash is kept."""
    monkeypatch.setattr(datasource, "_hash_files", datasource._hash_files.__wrapped__)


def dataset(root: Path, text: str = "old") -> Path:
    home = root / "org/data"
    (home / "main").mkdir(parents=True)
    (home / "README.md").write_text("---\nconfigs: []\n---\n")
    (home / "main/test.parquet").write_text(text)
    return home


@pytest.mark.parametrize("linked", ["org/data", "org/data/main/test.parquet"])
def test_what_a_link_leads_to_is_hashed(tmp_path: Path, linked: str, fresh: None) -> None:
    plain, root = tmp_path / "plain", tmp_path / "root"
    dataset(plain)
    dataset(root)
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / Path(linked).name
    (root / linked).rename(moved)
    (root / linked).symlink_to(moved)
    before = DataSource("mine", root).fingerprint("org/data")
    assert before == DataSource("mine", plain).fingerprint("org/data")
    (root / "org/data/main/test.parquet").write_text("new")
    assert DataSource("mine", root).fingerprint("org/data") != before
