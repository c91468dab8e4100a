from tests.conftest import datasets_cache, hub, one_thread, real_hub  # noqa: F401
