"""Verdicts on programs: right ones pass, wrong ones do not, and cheating does not help."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.generation import programs
from capmoe_eval.evaluation.generation.inside import plain
from capmoe_eval.evaluation.generation.programs import Problem, judge, judge_all
from capmoe_eval.evaluation.generation.sandbox import Sandbox
from capmoe_eval.zoo.sets import documents

HUMANEVAL = "openai/openai_humaneval"
DOUBLE = Problem(
    'def double(x):\n    """Return twice x."""\n',
    "double",
    "def check(candidate):\n    assert candidate(21) == 42\n    assert candidate('a') == 'aa'\n",
)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox.open(cpu_seconds=1)
    except UsageError as error:
        pytest.skip(str(error))


def problem(row: dict[str, str]) -> Problem:
    return Problem(row["prompt"], row["entry_point"], row["test"])


def plainly(asked: Problem, completion: str) -> bool:
    """The definition: the test runs after the program, in one interpreter."""
    names: dict[str, Any] = {}
    try:
        exec(asked.prompt + completion + "\n" + asked.test, names)
        names["check"](names[asked.entry_point])
    except Exception:
        return False
    return True


VERDICTS = {
    "    return x * 2\n": "passed",
    "    print('x', flush=True)\n    return x + x\n\n\nprint(input)\n": "passed",
    "    return 42\n": "wrong",
    "    pass\n": "wrong",
    "": "wrong",
    "    return x *\n": "raised",
    "    return x - 'a'\n": "raised",
    "    return input()\n": "raised",
    "    return double(x)\n": "raised",
    "    return x * 2\n\nraise SystemExit\n": "raised",
    "    return lambda: 0\n": "raised",
    "    return 42 # \ud800\n": "raised",
    "    return 42 \0": "raised",
    "    import os\n    os._exit(0)\n": "ended",
    "    return '\\0' * 2**23\n": "ended",
    "    return float('inf')\n": "ended",
    "    while True:\n        pass\n": "out of time",
}


def test_verdicts(sandbox: Sandbox) -> None:
    pairs = [(DOUBLE, completion) for completion in VERDICTS]
    judged = dict(zip(VERDICTS, judge_all(sandbox, pairs)[0], strict=True))
    assert judged == VERDICTS


def test_one_that_waited_beside_others_can_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[str] = []
    tries: Counter[str] = Counter()

    def judge_once(_: object, __: object, name: str) -> str:
        running.append(name)
        tries[name] += 1
        again = tries[name] > 1
        assert not again or running == [name]
        running.remove(name)
        return "waited" if name == "starved" and not again else "passed"

    monkeypatch.setattr(programs, "judge", judge_once)
    names = ["starved", *map(str, range(9))]
    judged = judge_all(None, [(DOUBLE, name) for name in names])  # type: ignore[arg-type]
    assert judged == (["passed"] * 10, 1)
    assert tries == {**dict.fromkeys(names, 1), "starved": 2}


# The program's sandbox works while that of the test waits for it.
WORKS = "    while time.process_time() < 2.5:\n        pass\n    return x * 2\n\nimport time\n"
ONCE = DOUBLE._replace(test="def check(double):\n    assert double(21) == 42\n")
ENDLESS = DOUBLE._replace(test="def check(candidate):\n    while True:\n        pass\n")
POWER = "def check(power):\n    assert power(10, 20_000) == 10 ** 20_000\n"
POWER += "    assert power(10 ** 20_000, 1) == 10 ** 20_000\n"
LONG = Problem("def power(x, y):\n    'Return x to the power of y.'\n", "power", POWER)
# A test may call what stands beside the function; a program cannot replace it.
BESIDE = Problem(
    "def inverse(x):\n    return -x\n\n\ndef same(x):\n    '''Return x.'''\n",
    "same",
    "def check(candidate):\n    assert inverse(same(3)) == -3\n",
)
COUNT = "def check(f):\n    assert f('aab') == {'a': 2, 'b': 1}\n"
COUNTER = "    import collections\n    return collections.Counter(x)\n"
FORGED = "    return 0\n\nimport os\nfor number in range(3, 10):\n    try:\n"
FORGED += "        os.write(number, b'(True, {})\\n')\n    except OSError:\n        pass\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "completion", "verdict"),
    [
        (ONCE, WORKS, "passed"),
        (ENDLESS, "    return x * 2\n", "out of time"),
        (LONG, "    return x ** y\n", "passed"),
        (LONG, "    return x ** y + 1\n", "wrong"),
        # Answers that nest too deep cannot be read.
        (DOUBLE, FORGED.format("[" * 5000 + "]" * 5000), "ended"),
        (DOUBLE, FORGED.format("-" * 10_000 + "1"), "ended"),
        (BESIDE, "    return x\n", "passed"),
        (BESIDE, "    return 4\n\ndef inverse(x):\n    return -3\n", "wrong"),
        # An answer of a further type compares as its base does.
        (Problem("def count(x):\n    'Count.'\n", "count", COUNT), COUNTER, "passed"),
    ],
)
def test_verdicts_on_other_problems(
    sandbox: Sandbox, asked: Problem, completion: str, verdict: str
) -> None:
    patient = replace(sandbox, limits={**sandbox.limits, "cpu_seconds": 3})
    assert judge(patient, asked, completion) == verdict


EQUAL = """
class Equal({}):
    def __eq__(self, other):
        return True
    def __ne__(self, other):
        return False
    def __hash__(self):
        return 0
    def __repr__(self):
        return "42"
"""

CHEATS = {
    "what it prints": "    print('passed', (True, 42))\n",
    "an early exit": "    return 0\n\nimport sys\nsys.exit(0)\n",
    "an exit in a call": "    raise SystemExit(0)\n",
    "an early hard exit": "    return 0\n\nimport os\nos._exit(0)\n",
    "an exit at the end": "    return 0\n\nimport atexit, os\natexit.register(os._exit, 0)\n",
    "a kill": "    import os\n    os.kill(1, 9)\n    os.kill(-1, 9)\n",
    "another AssertionError": "    return 0\n\nimport builtins\n"
    "builtins.AssertionError = type('Never', (Exception,), {})\n",
    "other builtins": "    return 0\n\nimport builtins\nbuiltins.__build_class__ = None\n"
    "builtins.repr = lambda *_: '(True, 42)'\nbuiltins.exec = lambda *_: None\n",
    "another check": "    return 0\n\ndef check(candidate):\n    pass\n",
    "another exit": "    return 0\n\nimport sys\nsys.exit = lambda *_: None\n",
    "an object that equals all": f"    return Equal()\n{EQUAL.format('object')}",
    "a number that equals all": f"    return Equal()\n{EQUAL.format('int')}",
    "a text that equals all": f"    return Equal()\n{EQUAL.format('str')}",
    "a false class": f"    return Equal()\n{EQUAL.format('')}    __class__ = int\n"
    "    def __int__(self):\n        return self\n",
    "answers before they are asked for": "    return 0\n\nimport os\nfor number in range(3, 64):\n"
    "    try:\n        os.write(number, b'(True, 42)\\n' * 9)\n    except OSError:\n        pass\n",
    "the frames above": "    import sys\n    frame = sys._getframe()\n    while frame:\n"
    "        for value in frame.f_locals.values():\n            if value in (42, 'aa'):\n"
    "                return value\n        frame = frame.f_back\n",
    "the source of the test": "    import gc\n    text = open('/given').read() + "
    "open('/script.py').read()\n    text += str([o for o in gc.get_objects() if "
    "isinstance(o, (dict, list, tuple))])\n    return 42 if 'candidate(21) == 42' in text else 0\n",
    "a file for the test": "    return 0\n\nfor name in ('random', 'ast', 'sitecustomize'):\n"
    "    open(f'/tmp/{name}.py', 'w').write('import os; os._exit(0)')\n",
    "a process that stays": "    return 0\n\nimport os\nif os.fork():\n    os._exit(0)\n",
    "a comparison in a thread": "    return 0\n\nimport threading, builtins\n"
    "threading.Thread(target=setattr, args=(builtins, 'bool', lambda _: True)).start()\n",
}


def test_cheating_does_not_help(sandbox: Sandbox) -> None:
    pairs = [(DOUBLE, completion) for completion in CHEATS.values()]
    verdicts = dict(zip(CHEATS, judge_all(sandbox, pairs)[0], strict=True))
    assert not {trick for trick in CHEATS if verdicts[trick] not in {"wrong", "raised", "ended"}}


def test_some_cheats_pass_where_test_and_program_share_an_interpreter() -> None:
    """Otherwise the test above would show nothing."""
    shared = [CHEATS["an object that equals all"], CHEATS["a number that equals all"]]
    assert all(plainly(DOUBLE, completion) for completion in shared)


VALUES = (None, True, 3, -1.5, 2j, "é\n'\"", b"\0", [], [1, (2,), {3: {4}}], (), {}, {(1, 2): None})


def test_answers_arrive_as_they_are(sandbox: Sandbox) -> None:
    pairs = []
    for value in VALUES:
        assert plain(value) == value
        test = f"def check(candidate):\n    answer = candidate(({value!r},), named={value!r})\n"
        test += f"    assert answer == [({value!r},), {value!r}]\n"
        test += f"    assert type(answer[1]) is type({value!r})\n"
        asked = Problem("def both(a, named):\n    '''Return both.'''\n", "both", test)
        pairs.append((asked, "    return [a, named]\n"))
    assert judge_all(sandbox, pairs)[0] == ["passed"] * len(VALUES)


def test_a_number_cannot_say_that_it_is_another() -> None:
    class Forged(int):
        def __repr__(self) -> str:
            return "42"

    assert repr(plain([Forged(7)])) == "[7]"


@pytest.mark.parametrize("broken", [{"prompt": "def double(x):\n"}, {"test": "def check(:\n"}])
def test_data_that_cannot_be_tested_are_refused(sandbox: Sandbox, broken: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="double: its prompt or its test is no Python"):
        judge(sandbox, DOUBLE._replace(**broken), "    return x * 2\n")


@pytest.mark.slow
def test_the_mini_worlds_solutions_pass_and_others_fare_as_defined(sandbox: Sandbox) -> None:
    (splits,) = documents("miniworld")[HUMANEVAL].values()
    rows = splits["test"][::16]
    pairs = [(problem(row), row["canonical_solution"]) for row in rows]
    assert set(judge_all(sandbox, pairs)[0]) == {"passed"}
    solutions = [row["canonical_solution"] for row in rows]
    random.Random(0).shuffle(solutions)
    swapped = [(problem(row), each) for row, each in zip(rows, solutions, strict=True)]
    expected = [plainly(*pair) for pair in swapped]
    assert [verdict == "passed" for verdict in judge_all(sandbox, swapped)[0]] == expected
    assert not all(expected)
