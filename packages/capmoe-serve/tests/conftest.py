from __future__ import annotations

from tests.conftest import (  # noqa: F401
    datasets_cache,
    hub,
    one_thread,
    real_hub,
    real_tokenizer,
)
