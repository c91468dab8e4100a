"""The files of ``results/bench/``, and the times of expert parallelism as a data frame.

``capmoe-eval bench ep`` writes ``ep-*.json``, of a study or of a layer that was asked for by hand.
Every other benchmark writes ``<name>.json``, with targets beside whatever it likes. Nothing here
needs torch.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from capmoe_eval.errors import UsageError, reading, shown
from capmoe_eval.experiment.files import read_bytes
from capmoe_eval.experiment.names import BENCHMARKS
from capmoe_eval.lazy import pd
from capmoe_eval.paper.printed import figure
from pydantic_core import from_json

STUDIES: Final = (
    *("speedup", "granularity", "breakdown", "workload", "placement", "skew", "traces"),
)
"""Every study of expert parallelism; ``ep/studies.yaml`` says what each is about."""
EVALUATIONS: Final = (
    *("forward", "generate", "decision", "suite", "placement", "permutation", "gpu", "server"),
)
"""Every other benchmark; each writes ``<name>.json``, and its ``--help`` says what it measures."""
FIGURE_1: Final = "figure 1"
"""The routing of the paper's Figure 1: OLMoE's 64 experts on OpenBookQA."""
DROPLESS: Final = "dropless"
"""The method that all others are compared with: no capacity."""
EMULATED: Final = "emulated"
"""The kind of a study without real ranks: each rank's work was timed in turn on one device."""
STUDY_SCHEMA: Final = 2
EVALUATION_SCHEMA: Final = 1


def bench_command(study: str | None) -> str:
    """Return the command line that makes the file of a study, or of a layer by hand."""
    return "capmoe-eval bench ep" + (f" --study {study}" if study else "")


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

    @classmethod
    def of(
        cls,
        name: str,
        what: str,
        measured: Spread | list[float],
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        unit: str = "×",
    ) -> Target:
        """Return a number that should be at least or at most something, or is only reported."""
        ratio = measured if isinstance(measured, Spread) else Spread.of(measured)
        if at_most is not None:
            return cls(name, what, ratio, at_most, at_least=False, unit=unit)
        return cls(name, what, ratio, at_least, unit=unit)

    @property
    def met(self) -> bool | None:
        """True if the median reaches the target; None where there is none."""
        if self.target is None:
            return None
        reached = self.ratio.median
        return reached >= self.target if self.at_least else reached <= self.target

    def shown(self, value: float) -> str:
        """Return a value in the target's unit."""
        if self.unit == "share":
            # Two decimals; where they would be 0.00, two significant digits.
            digits = ".2g" if 0 < value < 0.5e-4 else ".2f"
            return f"{100 * value:{digits}}\u00a0%"
        digits = {"×": ".3f", "s": ".2f"}.get(self.unit, "g")
        return f"{value:{digits}}\u00a0{self.unit}".rstrip()

    def line(self, width: int = 44) -> str:
        """Return the number, its quartiles and its goal, the name in ``width`` characters."""
        median, low, high = map(self.shown, (self.ratio.median, self.ratio.low, self.ratio.high))
        goal = ""
        if self.target is not None:
            sign = "≥" if self.at_least else "≤"
            goal = f"{sign} {self.shown(self.target)}  {'met' if self.met else 'MISSED'}"
        quartiles = f"{low} – {high}"
        return f"{self.name:<{width}}{median:>10}  {quartiles:<22}{goal}".rstrip()

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


def read_evaluation(path: Path) -> dict[str, Any]:
    """Return the content of a benchmark's file, whose targets :func:`targets` takes.

    One that is not whole or of another schema is a UsageError; its one line names the command that
    makes the file anew.
    """
    with reading(path, "not a whole file", f"make it again: capmoe-eval bench {path.stem}"):
        content = _content(read_bytes(path), EVALUATION_SCHEMA)
        if not targets(content):
            raise UsageError("it has no targets")
        return content


def read_study(path: Path) -> pd.DataFrame:
    """Return the times of the file of a study, as :func:`timings_of`; errors as above."""
    names = (name for name in STUDIES if path.name.startswith(f"ep-{name}-"))
    with reading(path, "not a whole file", f"make it again: {bench_command(next(names, None))}"):
        data = read_bytes(path)
        frame = timings_of(study_rows(_content(data, STUDY_SCHEMA)))
        digest = hashlib.sha256(data).hexdigest()[:10]
        return frame.assign(path=str(path), digest=digest)


def _content(data: bytes, schema: int) -> dict[str, Any]:
    content: dict[str, Any] = from_json(data)
    if (version := content.get("schema", "none")) != schema:
        raise ValueError(
            f"it has schema {shown(version)}, this version of capmoe_eval reads schema {schema}"
        )
    return content


COLUMNS: Final = (
    # of the file
    *("study", "path", "digest", "kind", "measured", "note", "why", "date", "device", "machine"),
    *("dtype", "rounds", "scale"),
    # of the run, a layer over some ranks
    *("run", "model", "shape", "ranks", "experts_per_rank", "loads_why", "link"),
    # of the point, a batch under a routing
    *("point", "tokens_per_rank", "batch", "prompt", "place", "source", "peak"),
    # of the part, the method and the phase
    *("part", "layers", "label", "method", "gamma", "granularity", "candidates", "phase"),
    *("seconds", "seconds_q1", "seconds_q3"),
    # of the total
    *("speedup", "speedup_q1", "speedup_q3", "ideal", "reached", "miss_seconds", "miss_speedup"),
)
"""The columns of times, a row for each point, part, method and phase, as :func:`study_rows` yields
them; a missing text is empty. ``path`` and ``digest``, the beginning of its SHA-256, are of a file
that was read."""
_NUMBERS: Final = ("peak", "gamma", *COLUMNS[COLUMNS.index("seconds") :])


def timings_of(rows: Iterable[dict[str, Any]] = ()) -> pd.DataFrame:
    """Return times as a data frame with :data:`COLUMNS`."""
    return pd.DataFrame(rows, columns=[*COLUMNS]).astype(dict.fromkeys(_NUMBERS, float))


def study_rows(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the times of a study's content, with :data:`COLUMNS` but those of a file."""
    kind, machine = content["kind"], content["machine"]
    if kind == EMULATED and EMULATED.upper() not in (content["note"] or ""):
        raise ValueError("note does not say that it is EMULATED")
    noun = "thread" if machine["threads"] == 1 else "threads"
    threads = f", {machine['threads']} {noun}" if machine["device"] == "cpu" else ""
    of_file = {
        "study": content.get("study") or "",  # empty for a layer that was asked for by hand
        "kind": kind,  # emulated or measured
        "measured": EMULATED.upper() if kind == EMULATED else kind,  # not to be overlooked
        "note": content.get("note") or "",  # the warning of an emulation
        "why": content.get("why") or "",  # the reason for its sizes
        "date": content["date"],  # ISO 8601
        "device": machine["device"],  # cpu or cuda
        "machine": f"{machine['device']}: {machine['name']}{threads}, torch {machine['torch']}",
        "dtype": content["dtype"],
        "rounds": content["repeats"],  # counted ones, over which medians and quartiles are
        "scale": content["scale"],  # the divisor of the model's widths
    }
    for number, run in enumerate(content["runs"]):
        of_run = {
            "run": number,
            "model": run["model"] or run["shape"]["name"],  # the paper's, or a shape by hand
            "shape": run["shape"]["name"],
            "ranks": run["ranks"],
            "experts_per_rank": run["experts_per_rank"],
            "loads_why": run.get("why", ""),  # the reason for the routing
            "link": run["link"]["source"] if run["link"] else "",  # of an emulated exchange
        }
        for place, point in enumerate(run["points"]):
            of_point = {
                "point": place,
                "tokens_per_rank": point["tokens_per_rank"],
                "batch": point["batch"],  # sequences over all ranks
                "prompt": point["prompt"],  # tokens of each
                "place": point.get("place") or "",  # the paper's workload that it stands for
                "source": point["routing"].get("source") or "",  # a peak, Figure 1 or a record
                "peak": point["routing"]["peak"],  # the fullest expert's load over the mean
            }
            for row in _of_point(point):
                yield {**of_file, **of_run, **of_point, **row}


def _of_point(point: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each part, method and phase of a point."""
    prefill, check = point.get("prefill"), point.get("validation") or {}
    parts = [("layer", 1, point["timings"], check)]
    if prefill:  # of a whole model, with so many MoE layers
        parts.append(("prefill", prefill["layers"], prefill["timings"], check.get("prefill") or {}))
    for part, layers, timings, beside in parts:
        if [timing["method"] for timing in timings if timing["label"] is None] != [DROPLESS]:
            raise ValueError(f"timings do not have one row {DROPLESS!r} without a label")
        for timing in timings:
            label = timing["label"] or {}
            miss = beside.get("errors", {}).get(timing["method"], {})
            of_method = {
                "part": part,
                "layers": layers,
                "label": timing["method"],  # with all its knobs
                "method": label.get("name", DROPLESS),
                **{name: label.get(name) for name in ("gamma", "granularity", "candidates")},
                **_quartiles("speedup", timing["speedup"]),  # over dropless in the same round
                "ideal": timing["ideal_rank"],  # pairs of the fullest rank, dropless over these
                "reached": timing["reached"],  # the speedup's share of that gain
                # the share by which an emulation beside a measurement misses it
                "miss_seconds": miss.get("total"),
                "miss_speedup": miss.get("speedup"),
            }
            for phase, spread in timing["seconds"].items():  # total for all of them together
                yield {**of_method, "phase": phase, **_quartiles("seconds", spread)}


def _quartiles(name: str, spread: Mapping[str, float]) -> dict[str, float]:
    return {name: spread["median"], f"{name}_q1": spread["low"], f"{name}_q3": spread["high"]}


DEPLOYMENTS: Final = {
    "OLMoE": 8,
    "DeepSeek-V2-Lite": 8,
    "Qwen1.5-MoE": 6,
    "Mixtral": 8,
    "Qwen3": 8,
    "DeepSeek-V2": 8,
}
"""The number of GPUs of each model of the paper, by the beginning of the model's name. The first
four are those of Figures 4 and 5, in their order."""

MACHINE: Final = "eight H20 GPUs"
"""The machine of the paper's efficiency measurements (six of them for Qwen1.5-MoE)."""


def deployment(model: str) -> str:
    """Return the name in :data:`DEPLOYMENTS` of a model, or an empty text."""
    return max((name for name in DEPLOYMENTS if model.startswith(name)), key=len, default="")


RUN = ["path", "run"]
"""The columns of times that tell runs apart."""


@dataclass(frozen=True)
class Bench:
    """The benchmark files of a directory."""

    folder: Path = BENCHMARKS
    timings: pd.DataFrame = field(default_factory=timings_of)  # of all studies
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # others, by name
    broken: tuple[str, ...] = ()  # the error of each other file, one line each

    def best(self, study: str) -> pd.DataFrame:
        """Return the times of one file of each model, in the order of the paper's figures.

        Of several the one with as many ranks as the paper has GPUs is taken: 8 emulated ranks show
        the paper's deployment, 2 measured ones do not. Then the one with most runs of the model,
        for those over several numbers of ranks belong together. Of those left a measured one goes
        before an emulated one, and a wider layer before a narrow one.
        """
        times = self.timings[self.timings["study"] == study]
        runs = times.drop_duplicates(RUN)
        papers = runs["model"].map(deployment)
        places = {name: place for place, name in enumerate(DEPLOYMENTS)}
        runs = runs.assign(
            deployed=papers.map(DEPLOYMENTS) == runs["ranks"],
            real=runs["kind"] == "measured",
            width=-runs["scale"],
            place=papers.map(places).fillna(len(places)),
        )
        file = ["model", "path"]
        of_file = runs.groupby(file, as_index=False)
        files = of_file.max().assign(runs=of_file.size()["size"])
        by = ["deployed", "runs", "real", "width", "date", "path"]
        best = files.sort_values(by, ascending=False, kind="stable").drop_duplicates("model")
        return best.sort_values(["place", "model"])[file].merge(times, on=file)


def ranks_text(run: pd.Series[Any]) -> str:
    """Return the deployment of a run, the first of its times, in a few words."""
    noun = "expert" if run["experts_per_rank"] == 1 else "experts"
    return f"{run['ranks']} ranks × {run['experts_per_rank']} {noun}"


def widths_text(run: pd.Series[Any]) -> str:
    """Return the layer's widths, against the model's own."""
    return "full widths" if run["scale"] == 1 else f"widths 1/{run['scale']:g}"


def circumstances(times: pd.DataFrame) -> Iterator[str]:
    """Yield what must be said of emulations, sizes, routing and machines."""
    for _, run in times.drop_duplicates(RUN).iterrows():
        if run["note"]:
            yield f"{run['note']}."
        if run["why"]:
            yield f"Sizes: {run['why'].rstrip('.')}."
        if run["loads_why"]:
            text = f"Routing of {run['model']}: {run['loads_why'].rstrip('.')}"
            if run["source"] == FIGURE_1:  # whose loads sum to more than the experts
                highest = max(figure("fig1_load_svg_vector"))
                text += f", divided by their mean: at most {run['peak']:.1f}, printed {highest:.1f}"
            yield f"{text}."
        if run["link"]:
            # What follows the semicolon is of this one run, and in the numbers.
            yield f"The emulated exchange: {run['link'].partition('; ')[0]}."
        yield (
            f"{Path(run['path']).name}: {run['machine']}; {run['dtype']}, median of "
            f"{run['rounds']} rounds, {run['date'][:10]}."
        )


def read_bench(folder: Path = BENCHMARKS, study: str = "") -> Bench:
    """Read the files of a directory, or those of one study; a broken file takes no other with it.

    A directory that was named and is not there is a UsageError.
    """
    if folder != BENCHMARKS and not folder.is_dir():
        raise UsageError(f"--bench={folder}: no such directory; leave it out for {BENCHMARKS}")
    frames, evaluations, broken = list["pd.DataFrame"](), {}, list[str]()
    paths = sorted(folder.glob(f"ep-{study}-*.json" if study else "ep-*.json"))
    if not study:
        paths += [path for name in EVALUATIONS if (path := folder / f"{name}.json").is_file()]
    for path in paths:
        try:
            if path.stem in EVALUATIONS:
                evaluations[path.stem] = read_evaluation(path)
            else:
                frames.append(read_study(path))
        except UsageError as error:
            broken.append(str(error))
    timings = pd.concat(frames, ignore_index=True) if frames else timings_of()
    return Bench(folder, timings, evaluations, tuple(broken))
