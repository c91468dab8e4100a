"""Methods are registered, and their knobs checked by the types that declare them."""

import math
import pkgutil
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import AfterValidator, Field

from capmoe_eval import beside
from capmoe_eval.errors import UsageError
from capmoe_eval.routing import registry
from capmoe_eval.routing.capacity import factor_forms
from capmoe_eval.routing.knobs import LARGEST, Count, Seed, check, says
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


# A value is refused in one line of field, value and rule.


ALL = Annotated[None, Field(description="null for all")]
SHARE = Annotated[float, Field(gt=0, le=1, examples=[0.5])]
FACTORS = Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False, min_length=1)]
SCOPE = Literal["batch", "sequence"]


def even(number: int) -> int:
    """Refuse an odd number."""
    if number % 2:
        raise ValueError("must be even")
    return number


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (0, Count, "must be a whole number of at least 1"),
        (1.0, Count, "must be a whole number of at least 1"),
        ("1", Count, "must be a whole number of at least 1"),
        (LARGEST + 1, Count, f"must be a whole number of at least 1; {LARGEST} is the largest"),
        (np.True_, Count, "must be a whole number of at least 1"),
        (-1, Seed, f"must be a whole number from 0 to {2**63 - 1}"),
        (0, Count | ALL, "must be a whole number of at least 1, or null for all"),
        (0, SHARE, "must be a number above 0 and at most 1, for example key=0.5"),
        (True, SHARE, "must be a number above 0 and at most 1, for example key=0.5"),
        (math.inf, Annotated[float, Field(ge=0)], "must be a finite number of at least 0"),
        (3, Annotated[float, Field(ge=0, le=2)], "must be a number from 0 to 2"),
        (None, bool, "must be true or false"),
        ("bach", SCOPE, "did you mean 'batch'? choose one of batch, sequence"),
        (7, SCOPE | ALL, "choose one of batch, sequence, or null for all"),
        ("no", bool | Literal["calibrate"], "must be true or false, or calibrate"),
        ([0, 1.0], list[int], "must be a list, each item of which is a whole number"),
        ([1.0, True], FACTORS, "must be a list, each item of which is a number of at least 0"),
        (3, Annotated[int, AfterValidator(even)], "must be even"),
        ("x", Annotated[str, Field(pattern="^a+$"), says("some a")], "must be some a"),
    ],
)  # fmt: skip
def test_a_refusal_is_the_rule_in_one_line(value: Any, annotation: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        check("key", value, annotation)
    start, _, line = str(error.value).partition(": ")
    assert start.startswith("key=")
    assert line == message


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, Count, 1),
        (np.int64(1), Count, 1),
        (LARGEST, Count, LARGEST),
        (None, Count | ALL, None),
        ("auto", Count | Literal["auto"], "auto"),
        (1, SHARE, 1.0),
        (-0.0, Annotated[float, Field(ge=0)], 0.0),
        ([1, 2.5], FACTORS, (1.0, 2.5)),
        ("batch", SCOPE, "batch"),
        (False, bool, False),
    ],
)
def test_a_value_is_as_its_type_has_it(value: Any, annotation: Any, expected: Any) -> None:
    checked = check("key", value, annotation)
    assert repr(checked) == repr(expected)
