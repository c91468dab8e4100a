"""Register methods: from a module of the suite, of a user, and what is refused."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import Field

from capmoe_eval import beside
from capmoe_eval.errors import UsageError
from capmoe_eval.routing import registry
from capmoe_eval.routing.capacity import factor_forms
from capmoe_eval.routing.method import Bounded, Method
from capmoe_eval.routing.methods.baseline import Baseline
from capmoe_eval.routing.methods.token_drop import TokenDrop
from capmoe_eval.routing.registry import (
    calibrations,
    create_method,
    knobs,
    method_names,
    method_title,
    placements,
    register,
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a test register methods; the registry is as before after the test."""
    method_names()  # imports all
    monkeypatch.setattr(registry, "METHODS", dict(registry.METHODS))
    knobs.cache_clear()
    yield
    knobs.cache_clear()


def new_method(name: Any, base: type[Method] = Method, **body: Any) -> type[Method]:
    """Return a class of methods that is not registered yet."""
    about = {"name": name, "title": "Mine", "source": "a test", "__module__": __name__}
    return type("Mine", (base,), {**about, **body})


@pytest.mark.usefixtures("registered")
def test_a_registered_method_is_created_by_its_name() -> None:
    step = Annotated[int, Field(ge=1, description="how often")]
    mine = register(new_method("mine", Bounded, step=3, __annotations__={"step": step}))
    method = create_method("mine", 1.0, step=5, ep_size=4)
    assert type(method) is mine
    assert method == mine(gamma=1.0, step=5, ep_size=4)  # type: ignore[call-arg]
    assert method.identity()["step"] == 5
    assert method.label == "mine-g1-ep4-step5"
    assert (method_names()[-1], method_title("mine")) == ("mine", "Mine")
    assert knobs()["step"].help == "how often"
    # The knob of another method has no effect, and is checked.
    assert create_method("score", 1.0, step=5) == TokenDrop(gamma=1.0)
    for name in ("mine", "score"):
        with pytest.raises(UsageError, match=r"^step=0: must be a whole number of at least 1"):
            create_method(name, 1.0, step=0)


@pytest.mark.usefixtures("registered")
def test_a_class_may_be_registered_twice_and_its_name_not() -> None:
    assert register(Baseline) is Baseline  # as when a module is loaded anew
    with pytest.raises(ValueError, match=r"^Mine: Baseline has the name 'baseline' already$"):
        register(new_method("baseline"))
    assert type(create_method("baseline")) is Baseline


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["my method", "1st", None])
def test_a_bad_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"^Mine: name=.* must be a name such as 'my_method'$"):
        register(new_method(name))
    assert name not in method_names()
    assert method_title("of_another_version") == "of_another_version"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("rule", [Annotated[int, Field(ge=2)], Annotated[str, Field()]])
def test_a_knob_is_declared_in_one_way(rule: Any) -> None:
    register(new_method("mine", rounds=3, __annotations__={"rounds": rule}))
    line = r"^rounds: \S+\.Mine declares this knob in another way than another method; give it an"
    with pytest.raises(UsageError, match=line):
        knobs()


def test_every_kind_of_calibration_that_a_method_names_is_registered() -> None:
    kinds = [create_method(name, 1.0).calibration for name in method_names()]
    kinds += [*placements().values(), *(form.calibration for form in factor_forms())]
    assert {kind for kind in kinds if kind is not None} == calibrations().keys()
    for path in calibrations().values():
        assert pkgutil.resolve_name(path).__module__ == path.partition(":")[0]


@pytest.mark.parametrize(
    ("setting", "settings"),
    [
        ("method=mine", {"name": "mine", "gamma": 1.0, "my_knob": 3}),
        ("gamma=mine", {"name": "score", "gamma": "mine"}),
        ("placement=mine", {"name": "score", "gamma": 1.0, "placement": "mine"}),
        ("my_knob", {"name": "score", "gamma": 1.0, "my_knob": 3}),
    ],
)
def test_what_a_package_beside_the_suite_brings_says_which_to_install(
    setting: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "BESIDE", {"my-package": {setting}})
    line = rf"^{setting}: my-package is not installed; in a checkout, pip install"
    with pytest.raises(UsageError, match=line):
        create_method(**settings)
