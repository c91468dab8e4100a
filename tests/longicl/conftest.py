from tests.tiny.conftest import datasets_cache, hub, one_thread, real_hub

__all__ = ["datasets_cache", "hub", "one_thread", "real_hub"]
