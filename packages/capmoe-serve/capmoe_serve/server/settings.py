"""Read a server's settings from its environment: ``CAPMOE_METHOD=score CAPMOE_GAMMA=1.0``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from capmoe_eval.errors import UsageError, bad_choice, shown
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import STOCK, TOKEN_DROP, create_method, knobs

PREFIX = "CAPMOE_"
"""How the names of the variables begin; the rest is a setting's name in capitals."""
_OWN = ("method", "gamma", "trace", "trace_tokens")
_OTHERS = ("data_root", "results_dir", "debug")
"""Settings of other commands that may stand in the same environment."""
TRACE_TOKENS = 100_000
"""Tokens of a trace, if ``CAPMOE_TRACE_TOKENS`` does not say otherwise."""


def read_settings(environment: Mapping[str, str]) -> tuple[Method, Path | None, int] | None:
    """Return method, directory and tokens of the trace; None where ``CAPMOE_METHOD`` is not set.

    Raises:
        UsageError: For an unknown variable, an invalid value, or a method that a server's step
            cannot decide.
    """
    values = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX)
    }
    values = {name: value for name, value in values.items() if name not in _OTHERS}
    names = (*_OWN, *knobs())
    variables = [_variable(name) for name in names]
    for name in values:
        if name not in names:
            hint = str(bad_choice("variable", _variable(name), variables)).split(": ", 1)[1]
            raise UsageError(f"{_variable(name)}={shown(values[name])}: {hint}")
    if "method" not in values:
        if values:
            name = next(iter(values))
            raise UsageError(
                f"{_variable(name)}={shown(values[name])}: has no effect without "
                f"{PREFIX}METHOD; set {PREFIX}METHOD=score, for example"
            )
        return None
    name, gamma = values.pop("method"), _value(values.pop("gamma", None))
    trace, tokens = values.pop("trace", None), _value(values.pop("trace_tokens", TRACE_TOKENS))
    if not isinstance(tokens, int) or tokens < 1:
        raise UsageError(
            f"{PREFIX}TRACE_TOKENS={shown(tokens)}: must be a whole number of at least 1"
        )
    try:
        method = create_method(name, gamma, **{knob: _value(text) for knob, text in values.items()})
        check_method(method)
    except UsageError as error:  # which names settings as other commands do
        setting = rf"\b({'|'.join(names)})(?==)|^({'|'.join(names)})(?=:)"
        line = re.sub(setting, lambda match: _variable(match[0]), str(error))
        raise UsageError(line) from error
    if method.is_stock and name != STOCK and str(gamma) != "inf":
        raise UsageError(
            f"{PREFIX}METHOD={name}: drops nothing in an engine, which has all experts of one "
            f"rank; choose another method, such as {PREFIX}METHOD={TOKEN_DROP}"
        )
    return method, None if trace is None else Path(trace), tokens


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _value(text: Any) -> Any:
    """Return the value of a variable: a number, true, false, null, or a name."""
    if not isinstance(text, str):
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if value is None and text.strip().lower() not in ("null", "~", "") else value


def check_method(method: Method) -> None:
    """Refuse a method that the scores of one step of one engine do not decide.

    Raises:
        UsageError: The message is one line that names the setting, the reason and the fix.
    """
    engine = "an engine has the tokens of one rank, and its step is one capacity group"
    if method.ep_size != 1:
        raise UsageError(f"ep_size={method.ep_size}: {engine}; leave ep_size out")
    if method.scope != "batch":
        raise UsageError(f"scope={method.scope}: {engine}; leave scope out")
    if method.count_padding:
        raise UsageError(
            "count_padding=true: a server's padding rows take no slot; leave count_padding out"
        )
    if method.calibration is not None:
        raise UsageError(
            f"method={method.name}: needs a calibration ({method.calibration}) of the model, which "
            "a server does not make; choose another method, such as method=score"
        )
    if (setting := method.modality_setting) is not None:
        raise UsageError(
            f"{setting}: a step does not tell which tokens are an image's; leave it out, or choose "
            "another method"
        )
