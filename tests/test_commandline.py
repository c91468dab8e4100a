"""What a user types, and what comes back."""

import json
import sys
from pathlib import Path

import pytest
import torch

from capmoe_eval.errors import EnforcementError
from capmoe_eval.evaluation import evaluate as evaluation
from capmoe_eval.evaluation import lm_eval_command as lm_eval_commandline
from capmoe_eval.evaluation import run_command as commandline
from capmoe_eval.evaluation.generation.programs import ProgramTask
from capmoe_eval.evaluation.tasks import OURS, TaskLibrary
from capmoe_eval.experiment.cell import PROGRAMS, Cell
from capmoe_eval.experiment.composition import composed, options
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.datasource import data_source
from capmoe_eval.experiment.record import read_record
from capmoe_eval.experiment.results import record_paths
from capmoe_eval.zoo.checkpoints import TRAINED, WEIGHTS
from capmoe_eval.zoo.hub import ready
from tests import records as made
from tests.bad_input import MAIN
from tests.conftest import Shell
from tests.nightly import nightly_but
from tests.project import run
from tests.records import forge
from tests.satellites import HAS_METHODS


def test_one_evaluation_prints_a_result_table(shell: Shell) -> None:
    status, out, err = shell("gamma=1.0", "method=score", "tasks=[obqa,rte]", "limit=4")
    assert status == 0
    heading, obqa, rte, legend, count, note = out.splitlines()
    assert heading.split()[:5] == ["task", "model", "method", "score", "±"]
    assert obqa.startswith("obqa  zoo_olmoe  score-g1-ep8")
    assert rte.startswith("rte")
    path = shell.cwd / obqa.split()[-1]
    record = read_record(path)
    assert f"{100 * record.value:.1f}" in obqa
    assert f" {record.load.effective_gamma:.2f} " in obqa
    assert f"{100 * record.load.drop_rate:.1f} %" in obqa
    assert f"{record.load.peak_before:.2f} → " in obqa
    assert all(f"{column}: " in legend for column in ("score", "dropped", "peak"))
    assert count == "2 computed, 0 finished before, 0 failed"
    assert "closed mini-world" in note
    assert "[2/2] zoo_olmoe rte" in err
    assert [path.name for path in shell.cwd.iterdir()] == ["results"]


@pytest.mark.slow
def test_shipped_results_are_finished_and_never_written(shell: Shell) -> None:
    """A clone stays clean: what a user computes lies apart, and tables show both."""
    words = ("model=tiny_olmoe", "tasks=obqa", "limit=2", "ep_size=2")
    shell(*words, "method=baseline")
    shipped, mine = shell.cwd / "results/tiny", shell.cwd / "results/local-tiny"
    mine.rename(shipped)
    before = {path: path.read_bytes() for path in shipped.rglob("*") if path.is_file()}
    status, out, _ = shell("-m", *words, "method=baseline,score", "gamma=1.0")
    assert status == 0
    assert "1 computed, 1 finished before, 0 failed" in out
    assert len(record_paths(mine)) == 1
    assert "results/tiny/tiny_olmoe/obqa/baseline" in out
    assert shell(*words, "method=baseline", "overwrite=true")[0] == 0
    status, out, _ = shell(*words, "method=baseline")
    assert "0 computed, 1 finished before" in out
    assert "local-tiny/tiny_olmoe/obqa/baseline" in out
    status, out, _ = shell(*words, "method=baseline", "results_dir=mine")
    assert "1 computed" in out, "a directory that is named stands alone"
    for name in ("table2", "all"):
        assert shell("table", name, "profile=tiny")[0] == 0
    assert {path: path.read_bytes() for path in shipped.rglob("*") if path.is_file()} == before


HEAVY = {"torch", "transformers", "datasets", "lm_eval"}
"""Libraries that take seconds to be imported."""
PROBE = """
import sys
from capmoe_eval.__main__ import main
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit as done:
        print("status", done.code, file=sys.stderr)
print(*(name for name in sys.modules if "." not in name), file=sys.stderr)
"""


def imported(*lines: str, cwd: Path) -> tuple[str, set[str]]:
    """Run command lines in a process: what they say, with their status, and what is imported."""
    path = str(Path(commandline.__file__).parents[2])
    done = run(sys.executable, "-c", PROBE, *lines, cwd=cwd, PYTHONPATH=path)
    *said, modules = done.stderr.splitlines()
    return "\n".join([done.stdout, *said]), set(modules.split())


NEEDS_NO_LIBRARY = (
    *("model.pretrained=file model.name=mine tasks=obqa", "model.tokenizer=/no/such tasks=obqa"),
    *("tasks=humaneval", "data.root=file", "results_dir=file", "parallel=ep"),
    "model.pretrained=/no/such model.name=mine tasks=obqa",
)
"""Rows of the table of refusals."""


def test_what_needs_no_library_is_refused_before_any_is_imported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    output, modules = imported(*NEEDS_NO_LIBRARY, cwd=tmp_path)
    lines = [line for line in output.splitlines() if line]
    assert len(lines) == 2 * len(NEEDS_NO_LIBRARY), output
    for error, words in zip(lines[::2], NEEDS_NO_LIBRARY, strict=True):
        assert MAIN[words] in error
    assert set(lines[1::2]) == {"status 2"}
    assert not HEAVY & modules
    assert "hydra" in modules, "the probe sees what is imported"


def test_a_mistyped_key_is_named_before_hydra_is_imported(tmp_path: Path) -> None:
    output, modules = imported("run gama=1", cwd=tmp_path)
    assert "key=gama: did you mean 'gamma'" in output
    assert not {"hydra", "omegaconf", "numpy"} & modules


def test_nothing_left_to_compute_needs_no_library(shell: Shell) -> None:
    words = ("tasks=obqa", "limit=2", "gamma=1.0")
    assert "1 computed" in shell(*words)[1]
    output, modules = imported(" ".join(words), cwd=shell.cwd)
    assert "0 computed, 1 finished before" in output
    assert not HEAVY & modules
    (path,) = record_paths(shell.cwd / "results/local-zoo")
    content = json.loads(path.read_text())["capmoe"]
    forge(made.record(Cell.from_identity(content["cell"]), shell.cwd / "results/local-zoo"))
    output, modules = imported(" ".join(words), cwd=shell.cwd)
    assert "computed from other documents" in output
    assert "status 2" in output
    assert not HEAVY & modules


def test_the_tasks_that_run_programs_are_those_of_the_sandbox() -> None:
    """What is refused without a library is what the library would refuse."""
    files = [file for path in OURS for file in path.glob("*.yaml")]
    unsafe = [file.stem for file in files if "unsafe_code: true" in file.read_text()]
    assert (unsafe, PROGRAMS) == (["humaneval"], ("capmoe_humaneval",))
    (task,) = TaskLibrary().get(PROGRAMS[0], ready(data_source("miniworld")))["tasks"].values()
    assert isinstance(task, ProgramTask)


@pytest.mark.slow
def test_a_broken_invariant_needs_mending(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise EnforcementError("capacity not enforced")

    monkeypatch.setattr(evaluation, "evaluate", broken)
    status, _, err = shell("model=tiny_olmoe", "tasks=[obqa,rte]", "limit=1")
    assert status == 1
    assert err.count("FAILED: EnforcementError: capacity not enforced") == 2
    assert err.count("An invariant is broken: mend the method, or report it") == 1


NO_EFFECT = {
    "method=score modality=image_first": "modality=image_first",
    "method=score budget_of=scores seed=2": "budget_of=scores seed=2",
    "method=score max_num_batched_tokens=100": "max_num_batched_tokens=100",
    "method=score gamma=1.0 layer_gammas=[2.0,2.0,2.0]": "gamma=1.0",
    # A device's capacity holds every pair.
    "method=score gamma=1.0 granularity=device ep_size=1": "ep_size=1",
    "method=score scope=sequence ep_size=2": "ep_size=2",
    # The model's router does not normalise, and the task generates nothing.
    "method=score gamma=1.0 renormalize=after": "renormalize=after",
    "-m method=score,random gamma=1.0 decode=unconstrained,constrained": "decode=constrained",
    # These have an effect, or are what holds without them.
    "method=score gamma=1.0 renormalize=always decode=unconstrained": "",
    "method=score gamma=1.0 variant=released_code": "",
    "method=token_reroute gamma=1.0 rounds=1": "",
    "method=score gamma=inf": "",
    "method=score gamma=1.0 modality=uniform ep_size=1": "",
    "-m method=score gamma=1.0 granularity=expert,device ep_size=2": "",
    "-m method=score,baseline gamma=1.0 scope=sequence": "",
    "-m backend=transformers,vllm max_num_batched_tokens=100 method=score": "",
}
"""Command lines, and their settings without effect."""


@pytest.mark.parametrize("words", NO_EFFECT)
def test_a_knob_that_changes_no_cell_is_named(words: str, shell: Shell) -> None:
    _, _, err = shell(*words.split(), "model=tiny_olmoe", "tasks=obqa", "plan=true")
    lines = [line for line in err.splitlines() if line.startswith("warning: ")]
    for line, setting in zip(lines, NO_EFFECT[words].split(), strict=True):
        assert line.startswith(f"warning: {setting}: ")


def test_a_sweep_with_a_plan_computes_nothing(shell: Shell) -> None:
    """The last job alone said whether the cells are computed."""
    status, out, _ = shell("-m", "plan=true,false", "model=tiny_olmoe", "tasks=obqa", "limit=1")
    assert status == 0
    assert out.startswith("Missing cells: 1 of 1. None was computed now")


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_an_absent_gpu_is_warned_of_once(shell: Shell) -> None:
    words = "model=tiny_olmoe", "tasks=obqa", "limit=1", "gamma=1.0", "device_map=auto"
    _, _, err = shell("-m", *words, "method=order,score")
    message = f"warning: device_map=auto: torch {torch.__version__} sees no GPU here; the model is "
    assert err.count(f"{message}computed on the CPU") == 1


def test_variants_are_presets() -> None:
    names = ["paper", "released_code", "released_code_images", "released_code_606dc1d"]
    knobs = ("count_padding", "ep_size", "candidates", "rounding", "renormalize")
    methods = [
        plans(composed([f"variant={name}", "method=expanded_drop", "tasks=obqa"]))[0].cell.method
        for name in (*names, "algorithms")
    ]
    assert [tuple(map(method.setting, knobs)) for method in methods] == [
        (False, 8, "local", "ceil", "before"),
        (True, 1, "global", "ceil", "after"),
        (False, 1, "ranked", "ceil", "after"),
        (True, 1, "ranked", "ceil", "always"),
        (False, 1, "global", "floor", "before"),  # on one rank all experts are local
    ]


def test_a_failing_cell_gives_status_1_and_keeps_the_others(shell: Shell) -> None:
    """Its line says what to do without the hub."""
    words = ("-m", "model=olmoe,tiny_mixtral", "tasks=obqa", "limit=2", "data.root=miniworld")
    status, out, err = shell(*words)
    assert status == 1
    assert "1 computed, 0 finished before, 1 failed" in out
    line = next(line for line in err.splitlines() if line.startswith("failed: "))
    assert line.startswith("failed: olmoe obqa score-g2-ep8: model.pretrained=allenai/OLMoE")
    assert all(fix in line for fix in ("model.pretrained=PATH", "HF_ENDPOINT", "model=tiny_olmoe"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    nightly_but(
        ("adaptive", "table1"),
        sorted({*options("experiment")} - {"banking77", "passages", "server"}),
    ),
)
def test_each_experiment_runs(shell: Shell, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few cells of each grid, one document per task; programs of a model are not run.

    That of a server needs vLLM: packages/capmoe-serve/tests/server/test_vllm.py runs it.
    """
    if HAS_METHODS:
        monkeypatch.setattr("capmoe_methods.calibration.DOCUMENTS", 8)
    words = [f"experiment={name}", "profile=tiny", "limit=1"]
    if name == "table7":
        words.append("grid.tasks=[nq_open,mts_dialog]")
    cells = sorted(plans(composed(words)), key=lambda plan: plan.cell.digest)
    few = cells[:: max(1, len(cells) // 4)]
    status, out, _ = shell(main=lambda _: sys.exit(commandline.execute(few)))
    assert status == 0, out
    assert " 0 failed" in out
    assert " 0 computed" not in f" {out}"


def test_a_table_is_not_replaced_by_an_empty_one(shell: Shell) -> None:
    words = ("grid.model=[tiny_olmoe]", "profile=tiny", "limit=2", "tasks=[obqa]")
    assert shell("experiment=table2", *words)[0] == 0
    assert shell("table", "table2", *words)[0] == 0
    before = {path: path.read_bytes() for path in (shell.cwd / "reports/tiny").iterdir()}
    (shell.cwd / "empty").mkdir()
    words += ("results_dir=empty",)
    status, _, err = shell("table", "table2", *words)
    assert (status, err.count("\n")) == (2, 1)
    assert "reports/tiny/table2.csv: has entries, and no record of table2 is finished" in err
    assert shell("table", "all", *words)[0] == 2
    assert {path: path.read_bytes() for path in before} == before
    assert shell("table", "table2", *words, "--out=new")[0] == 0


MINIWORLD = [
    f"zoo_{name}"
    for name in TRAINED
    if any((WEIGHTS / name).glob("model.safetensors*")) and name != "llava_olmoe"
]


@pytest.mark.parametrize("name", nightly_but(("zoo_olmoe",), MINIWORLD))
def test_the_zoo_knows_its_world(shell: Shell, name: str) -> None:
    """Four choices, 25 % by chance; and dropping everything costs a model what it knows."""
    words = (f"model={name}", "tasks=obqa", "limit=60", "grid.method=[baseline,score]", "gamma=0")
    assert shell(*words)[0] == 0
    values = {r.method: r.value for r in map(read_record, shell.cwd.glob("results/*/*/*/*.json"))}
    assert values["baseline"] > 0.7
    assert values["score"] < values["baseline"]


def test_paper_profiles_plan_the_papers_grids() -> None:
    """Table 1: a baseline and 3 γ × (3 metrics + random with 3 seeds); Table 2: 4 models × 4."""
    one = plans(composed(["experiment=table1", "profile=paper"]))
    assert len(one) == 8 * (1 + 3 * (3 + 3))
    two = plans(composed(["experiment=table2", "profile=paper"]))
    assert len(two) == 9 * 4 * 4
    bounded = [plan.cell for plan in two if plan.cell.method.is_capped]
    gammas = {cell.model.name: cell.method.uniform_gamma for cell in bounded}
    assert gammas == {
        "olmoe_instruct": 2.0,
        "qwen1_5_moe_chat": 1.5,
        "deepseek_v2_lite_chat": 2.0,
        "mixtral_8x7b_instruct": 1.5,
    }
    ranks = {cell.model.name: cell.method.ep_size for cell in bounded}
    assert set(ranks.values()) == {6, 8}
    assert ranks["qwen1_5_moe_chat"] == 6


# lm-eval's own command line.


@pytest.mark.slow
def test_lm_evals_command_line_knows_capmoe(shell: Shell, tmp_path: Path, hub: Path) -> None:
    from capmoe_eval.zoo.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tiny_model("olmoe", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    task = tmp_path / "task.yaml"
    task.write_text(
        f"task: tiny_piqa\ndataset_path: {hub}/baber/piqa\noutput_type: multiple_choice\n"
        'validation_split: validation\ndoc_to_text: "{{goal}}"\ndoc_to_target: label\n'
        'doc_to_choice: "{{[sol1, sol2]}}"\n'
    )
    words = f"run --model capmoe --tasks {task} --limit 4 --device cpu --batch_size 4".split()
    words += ["--model_args", f"pretrained={tmp_path}/model,method=score,gamma=0.5,ep_size=2"]
    words += ["--output_path", str(tmp_path / "out")]
    shell._monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    lm_eval_commandline.main(words)
    (path,) = (tmp_path / "out").rglob("results*.json")
    told = json.loads(path.read_text())["config"]["capmoe"]
    assert told["method"]["gamma"] == 0.5
    assert told["method"]["ep_size"] == 2
    assert told["summary"]["dropped"] > 0
    assert all(proof["passed"] for proof in told["proofs"].values())


@pytest.mark.parametrize("words", [["--include", "mine"], ["--config", "file"], []])
def test_lm_evals_command_line_has_our_tasks_and_then_the_users(
    words: list[str], shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option of the user's holds however it is written; of two tasks the last path's counts."""
    Path("mine").mkdir()
    Path("file").write_text("include_path: mine")
    read: list[object] = []
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **by: read.append(by["include_path"]))
    shell("run", "--model", "capmoe", "--tasks", "x", *words, main=lm_eval_commandline.main)
    ours = str(Path(lm_eval_commandline.__file__).parent)
    assert read == [[ours, *(["mine"] if words else [])]]
