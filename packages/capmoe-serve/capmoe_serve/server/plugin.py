"""Register the capacity with vLLM: the entry point ``vllm.general_plugins`` calls :func:`register`.

vLLM logs a plugin that cannot be imported and runs on without it. So this module imports nothing,
and whatever fails, fails inside :func:`register`, which ends the process.
"""


def register() -> None:
    """Put vLLM's engines under ``CAPMOE_METHOD``; without the variable change nothing.

    Raises:
        SystemExit: With status 2, after one line that names the variable, the value and the fix.
    """
    import os
    import sys

    if not any(name.startswith("CAPMOE_") for name in os.environ):
        return
    from capmoe_eval.errors import UsageError

    try:
        from capmoe_serve.server.settings import read_settings

        settings = read_settings(os.environ)
        if settings is None:
            return
        from capmoe_serve.server.seam import install

        install(*settings)
    except (UsageError, ImportError) as error:
        print(f"capmoe_eval: {error}", file=sys.stderr)
        raise SystemExit(2) from error
