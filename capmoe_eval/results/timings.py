"""The files of ``results/bench/``, and the times of expert parallelism as a data frame.

``capmoe-eval bench ep`` writes ``ep-*.json``, of a study or of a layer that was asked for by hand.
Every other benchmark writes ``<name>.json``, with targets beside whatever it likes.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import from_json

from capmoe_eval.errors import UsageError, reading, shown
from capmoe_eval.experiment.files import read_bytes

if TYPE_CHECKING:
    import pandas as pd

STUDIES: Final = MappingProxyType(
    {
        "speedup": "speedup of one MoE layer and of a prefill, by model, method and γ",
        "granularity": "capacity of each expert against capacity of each device",
        "breakdown": "where a layer's time goes, phase by phase",
        "workload": "speedup by batch size and prompt length",
        "placement": "one model's experts over more or fewer ranks",
        "skew": "speedup by peak load, beside the ideal",
        "traces": "speedup with the routing of recorded layers",
    }
)
"""Every study of expert parallelism, and what it is about; ``studies.yaml`` has their sizes."""

EVALUATIONS: Final = MappingProxyType(
    {
        "forward": "our forward against stock transformers'",
        "generate": "our generation against stock transformers'",
        "decision": "the routing decision against the layer, and against Algorithms 1 and 2",
        "suite": "the suite against one lm-eval process per cell and task",
        "placement": "lossless load balancing against a capacity, on recorded routing",
        "permutation": "what the order of a batch's sequences decides",
        "gpu": "what a GPU must show: decisions, full-size speed, the paper's studies",
        "server": "vLLM under the plugin against stock vLLM",
    }
)
"""Every other benchmark, and what it is about; each writes ``<name>.json``."""

DROPLESS: Final = "dropless"
"""The method that all others are compared with: no capacity."""
EMULATED: Final = "emulated"
"""The kind of a study without real ranks: each rank's work was timed in turn on one device."""
STUDY_SCHEMA: Final = 2
EVALUATION_SCHEMA: Final = 1


def bench_command(study: str | None) -> str:
    """Return the command line that makes the file of a study, or of a layer by hand."""
    return "capmoe-eval bench ep" + (f" --study {study}" if study else "")


def evaluation_command(name: str) -> str:
    """Return the command line that makes the file of another benchmark."""
    return f"capmoe-eval bench {name}"


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the median and the quartiles of some values."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Target:
    """One measured number with its target."""

    name: str
    what: str  # one sentence: what is divided by what
    ratio: Spread  # the measurement, in ``unit``
    target: float | None = None  # the wanted value; None where it is only reported
    at_least: bool = True  # it should be at least that; otherwise at most
    # ``×`` for a ratio, ``share`` for a part of a whole, ``s`` for seconds; empty for a count
    unit: str = "×"

    @property
    def met(self) -> bool | None:
        """True if the median reaches the target; None where there is none."""
        if self.target is None:
            return None
        reached = self.ratio.median
        return reached >= self.target if self.at_least else reached <= self.target

    @property
    def goal(self) -> str | None:
        """The target in its unit; None where it is only reported."""
        if self.target is None:
            return None
        return f"{'≥' if self.at_least else '≤'} {self.shown(self.target)}"

    def shown(self, value: float) -> str:
        """Return a value in the target's unit."""
        if self.unit == "share":
            return f"{100 * value:.2f}\u00a0%"
        digits = {"×": ".3f", "s": ".2f"}.get(self.unit, "g")
        return f"{value:{digits}}\u00a0{self.unit}".rstrip()

    def fields(self) -> dict[str, Any]:
        """Return what a file says of it."""
        return {**asdict(self), "met": self.met}


def targets(evaluation: Mapping[str, Any]) -> list[Target]:
    """Return the targets of a benchmark's file; a ValueError if ``met`` does not follow."""
    rows = []
    for fields in evaluation["targets"]:
        values = dict(fields)
        met, ratio = values.pop("met", None), Spread(**values.pop("ratio"))
        rows.append(Target(**values, ratio=ratio))
        if met not in (None, rows[-1].met):
            raise ValueError(f"{rows[-1].name}: met is not what ratio and target say")
    return rows


def machine_text(machine: Mapping[str, Any]) -> str:
    """Return the machine of a file in a few words."""
    noun = "thread" if machine["threads"] == 1 else "threads"
    threads = f", {machine['threads']} {noun}" if machine["device"] == "cpu" else ""
    return f"{machine['device']}: {machine['name']}{threads}, torch {machine['torch']}"


def read_evaluation(path: Path) -> dict[str, Any]:
    """Return the content of a benchmark's file, whose targets :func:`targets` takes.

    One that is not whole or of another schema is a UsageError; its one line names the command that
    makes the file anew.
    """
    with _benchmark(path, evaluation_command(path.stem)):
        content = _content(read_bytes(path), EVALUATION_SCHEMA)
        if not targets(content):
            raise UsageError("it has no targets")
        for name in ("device", "name"):
            content["machine"][name]
        content["date"]
        return content


def read_study(path: Path) -> pd.DataFrame:
    """Return the times of the file of a study, as :func:`timings_of`; errors as above."""
    names = (name for name in STUDIES if path.name.startswith(f"ep-{name}-"))
    with _benchmark(path, bench_command(next(names, None))):
        data = read_bytes(path)
        frame = timings_of(_content(data, STUDY_SCHEMA))
        digest = hashlib.sha256(data).hexdigest()[:10]
        return frame.assign(path=str(path), digest=digest)


def read_timings(folder: Path, broken: list[str]) -> pd.DataFrame:
    """Return the times of all studies of a directory, in the order of the files' names.

    ``broken`` gets a line for each file that is not whole.
    """
    import pandas as pd

    frames = [no_timings()]
    for path in sorted(folder.glob("ep-*.json")):
        try:
            frames.append(read_study(path))
        except UsageError as error:
            broken.append(str(error))
    return pd.concat(frames[1:] or frames, ignore_index=True)


def no_timings() -> pd.DataFrame:
    """Return the times of no study."""
    import pandas as pd

    return pd.DataFrame(columns=[*COLUMNS])


def _benchmark(path: Path, command: str) -> Any:
    return reading(path, "not a whole file", f"make it again: {command}")


def _content(data: bytes, schema: int) -> dict[str, Any]:
    content: dict[str, Any] = from_json(data)
    if (version := content.get("schema", "none")) != schema:
        raise ValueError(
            f"it has schema {shown(version)}, this version of capmoe_eval reads schema {schema}"
        )
    return content


def timings_of(content: Mapping[str, Any]) -> pd.DataFrame:
    """Return the times of a study's content: a row for each point, part, method and phase.

    :data:`COLUMNS` says what each column means.
    """
    import pandas as pd

    frame = pd.DataFrame(rows_of(content), columns=[*COLUMNS])
    if frame.empty:
        raise ValueError("it has no times")
    frame = frame.astype(dict.fromkeys(_NUMBERS, float))
    for name in ("seconds", "speedup"):
        ends = frame[[f"{name}_q1", name, f"{name}_q3"]].to_numpy()
        if not ((ends[:, 0] >= 0) & (ends[:, :2] <= ends[:, 1:]).all(axis=1)).all():
            raise ValueError(f"{name}: a median is not between its quartiles")
    return frame


COLUMNS: Final = {
    # of the file
    "study": "empty for a layer that was asked for by hand",
    "path": "of a file that was read",
    "digest": "the beginning of its SHA-256",
    "kind": "emulated or measured",
    "note": "the warning of an emulation",
    "why": "the reason for its sizes",
    "date": "ISO 8601",
    "device": "cpu or cuda",
    "machine": "in words",
    "backend": "the library that connects real ranks",
    "dtype": "",
    "rounds": "counted rounds, over which medians and quartiles are",
    "scale": "the divisor of the model's widths",
    # of the run, a layer over some ranks
    "run": "its number in the file, from 0",
    "key": "the paper's model of this shape, or empty",
    "model": "that, or the name of the shape",
    "shape": "the name of the layer's sizes",
    "ranks": "",
    "experts_per_rank": "",
    "loads_why": "the reason for the routing",
    "link": "the source of an emulated exchange",
    # of the point, a batch under a routing
    "point": "its number in the run, from 0",
    "tokens_per_rank": "",
    "batch": "sequences over all ranks",
    "prompt": "tokens of each",
    "place": "the workload of the paper that it stands for",
    "peak": "the fullest expert's load over the mean",
    "together": "whether one rank has the popular experts",
    # of the part, the method and the phase
    "part": "layer, or prefill of a whole model",
    "layers": "MoE layers of the part",
    "label": "the method with all its knobs",
    "method": "dropless without a capacity",
    "gamma": "",
    "granularity": "what a capacity bounds: expert or device",
    "candidates": "which experts expanded_drop adds",
    "phase": "total for all of them together",
    "seconds": "the median, with quartiles",
    "seconds_q1": "",
    "seconds_q3": "",
    # of the total
    "speedup": "over the dropless pass of the same round",
    "speedup_q1": "",
    "speedup_q3": "",
    "ideal": "pairs of the fullest rank without a capacity over those with one",
    "reached": "the speedup's share of that gain",
    "dropped_share": "pairs of the tokens' top-k that are not computed",
    "miss_seconds": "the share by which an emulation beside a measurement misses it",
    "miss_speedup": "the same of the speedup",
}
"""The columns of :func:`timings_of`; a text that is not there is empty."""
_NUMBERS: Final = ("peak", "gamma", *[*COLUMNS][[*COLUMNS].index("seconds") :])


def rows_of(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of :func:`timings_of`; a machine that measures need not have pandas."""
    study, kind = content["study"], content["kind"]
    if study is not None and study not in STUDIES:
        raise ValueError(f"study {shown(study)} is none of {', '.join(STUDIES)}")
    if kind == EMULATED and EMULATED.upper() not in (content["note"] or ""):
        raise ValueError("note does not say that it is EMULATED")
    of_file = {
        **{name: content[name] or "" for name in ("study", "note", "backend")},
        **{name: content[name] for name in ("kind", "date", "dtype")},
        "why": content.get("why") or "",
        "device": content["machine"]["device"],
        "machine": machine_text(content["machine"]),
        "rounds": content["repeats"],
        "scale": content["scale"],
    }
    for number, run in enumerate(content["runs"]):
        points = run["points"]
        of_run = {name: run[name] for name in ("ranks", "experts_per_rank")}
        of_run |= {"run": number, "key": run["model"] or "", "shape": run["shape"]["name"]}
        of_run |= {"model": run["model"] or run["shape"]["name"], "loads_why": run.get("why", "")}
        of_run |= {"link": (run["link"] or {"source": ""})["source"]}
        for place, point in enumerate(points):
            of_point = {name: point[name] for name in ("tokens_per_rank", "batch", "prompt")}
            of_point |= {"point": place, "place": point.get("place") or ""}
            of_point |= {"peak": point["routing"]["peak"]}
            of_point |= {"together": point["routing"].get("together", False)}
            for row in _of_point(point):
                yield {**of_file, **of_run, **of_point, **row}


def _of_point(point: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each part, method and phase of a point."""
    prefill, check = point.get("prefill"), point.get("validation") or {}
    parts = [("layer", 1, point["timings"], check)]
    if prefill:
        parts.append(("prefill", prefill["layers"], prefill["timings"], check.get("prefill") or {}))
    for part, layers, timings, beside in parts:
        if [timing["method"] for timing in timings if timing["label"] is None] != [DROPLESS]:
            raise ValueError(f"timings do not have one row {DROPLESS!r} without a label")
        for timing in timings:
            label = timing["label"] or {"name": DROPLESS}
            miss = beside.get("errors", {}).get(timing["method"], {})
            whole = {
                **_quartiles("speedup", timing["speedup"]),
                "ideal": timing["ideal_rank"],
                "reached": timing["reached"],
                "dropped_share": timing["load"]["dropped_share"],
                "miss_seconds": miss.get("total"),
                "miss_speedup": miss.get("speedup"),
            }
            timing["seconds"]["total"]
            for phase, spread in timing["seconds"].items():
                yield {
                    **{"part": part, "layers": layers, "label": timing["method"]},
                    **{name: label.get(name) for name in ("gamma", "granularity", "candidates")},
                    **{"method": label["name"], "phase": phase},
                    **_quartiles("seconds", spread),
                    **whole,
                }


def _quartiles(name: str, spread: Mapping[str, float]) -> dict[str, float]:
    return {name: spread["median"], f"{name}_q1": spread["low"], f"{name}_q3": spread["high"]}
