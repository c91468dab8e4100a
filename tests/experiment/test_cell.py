"""A cell's identity: everything that can change its result is part of it."""

import dataclasses
import shlex
from pathlib import Path

import pytest

from capmoe_eval.experiment.cell import Cell, ModelId, TaskId
from capmoe_eval.experiment.commands import cell_command, sweeps
from capmoe_eval.experiment.composition import compose_words, composed, override
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.datasource import DIRECTORY
from capmoe_eval.experiment.record import EngineRun
from capmoe_eval.report.tables.filled import measured_table
from capmoe_eval.routing.registry import create_method
from hydra_plugins.capmoe_sweeper import sweep_jobs
from tests.records import SERVER, odd_cell, planned, record, write_all

MODEL = ModelId("mine", "org/model")
TASK = TaskId("obqa", "openbookqa", "allenai/openbookqa", "acc_norm", 0)
CELL = Cell(MODEL, create_method("score", 1.0), TASK, 16)
CELL_KEYS = {"model", "method", "task", "batch_size", "limit", "data", "eval_seed", "shuffle"}
FIELDS = {
    f"{part}{field.name}"
    for part, kind in {"": Cell, "model.": ModelId, "task.": TaskId}.items()
    for field in dataclasses.fields(kind)
} - {"model", "task"}
OTHER_TEXTS = (
    *("data", "system_instruction", "model.name", "model.pretrained", "model.revision"),
    *("model.tokenizer", "task.name", "task.lm_eval", "task.dataset", "task.filter"),
    *("task.file_hash", "task.encoder"),
)
OTHER_NUMBERS = (
    *("batch_size", "limit", "eval_seed", "shuffle", "max_num_batched_tokens"),
    *("model.max_length", "task.fewshot", "task.layer"),
)
OTHERS: dict[str, object] = {
    **dict.fromkeys(OTHER_TEXTS, "other"),
    **dict.fromkeys(OTHER_NUMBERS, 64),
    **dict.fromkeys(("apply_chat_template", "task.images", "task.rescale"), True),
    **{"model.dtype": "float32", "model.attention": "eager", "task.metric": "acc"},
    **{"backend": "vllm", "method": create_method("score", 1.5)},
}
"""Another value of each field."""


@pytest.mark.parametrize("path", sorted(FIELDS))
def test_every_field_is_part_of_the_identity(path: str) -> None:
    before, (part, _, field) = CELL, path.rpartition(".")
    change = {field: OTHERS[path]}
    if field == "backend":
        change["max_num_batched_tokens"] = 2048
    elif field == "max_num_batched_tokens":
        before = dataclasses.replace(CELL, backend="vllm", max_num_batched_tokens=2048)
    elif field in ("layer", "rescale"):  # of an encoder
        before = dataclasses.replace(CELL, task=dataclasses.replace(TASK, encoder="org/bert"))
    if part:
        change = {part: dataclasses.replace(getattr(before, part), **change)}
    changed = dataclasses.replace(before, **change)  # type: ignore[arg-type]
    assert changed.digest != before.digest
    assert Cell.from_identity(changed.identity()) == changed


def test_a_task_without_images_has_no_modality() -> None:
    first = dataclasses.replace(CELL, method=create_method("score", 1.0, modality="image_first"))
    assert first == CELL
    assert first.digest == CELL.digest
    images = dataclasses.replace(TASK, images=True)
    seen = [
        dataclasses.replace(CELL, task=images, method=create_method("score", 1.0, modality=name))
        for name in ("uniform", "image_first", "text_first")
    ]
    assert len({cell.digest for cell in (CELL, *seen)}) == 4
    assert seen[1].method.label == f"{CELL.method.label}-image_first"
    for cell in seen:
        assert Cell.from_identity(cell.identity()) == cell


def test_the_digest_of_a_cell_stays() -> None:
    """Committed records are found by it."""
    assert CELL.digest == "f0755a0678"


def test_static_batches_have_no_settings_of_an_engine() -> None:
    same = dataclasses.replace(CELL, max_num_batched_tokens=512)
    assert (same, same.digest, same.identity().keys()) == (CELL, CELL.digest, CELL_KEYS)


# The command of a cell must name that cell and no other.


def again(cell: Cell, directory: Path | None = None) -> Cell:
    """The one cell of the command line that is given for a cell."""
    command = cell_command(cell, "again")
    assert command is not None
    assert command.startswith("capmoe-eval run ")
    words = [word.replace(DIRECTORY, str(directory)) for word in shlex.split(command)[2:]]
    (plan,) = planned(*words)
    assert plan.path.parts[0] == "again"
    return plan.cell


@pytest.mark.parametrize(
    "words",
    [
        "model=zoo_olmoe method=baseline tasks=piqa",
        "model=zoo_mixtral method=score gamma=inf tasks=gsm8k limit=40",
        "model=olmoe method=random seed=2 tasks=mmlu dtype=float16",
        "model=zoo_olmoe method=expert_drop tasks=zero_shot_mix shuffle=1",
        "model=deepseek_v2_lite method=device_drop tasks=longicl_1 eval_seed=1",
        "model=deepseek_v2_lite tasks=longicl_2 tasks.longicl_2.batch_size=4",
        "model=zoo_olmoe tasks=obqa tasks.obqa.fewshot=3 batch_size=1",
        "model=zoo_olmoe tasks=obqa data.root=miniworld model.max_length=64",
        "model=zoo_llava_olmoe tasks=easy_vqa modality=text_first",
        "tasks=mts_dialog",
        "tasks=mts_dialog tasks.mts_dialog={metric:bertscore_f1,encoder:roberta-large,layer:17}",
        "model=zoo_llava_olmoe tasks=easy_vqa tasks.easy_vqa.data_root=null",
        "model=zoo_llava_olmoe tasks=mme tasks.mme.dataset=lmms-lab-encoder/MME",
        "model=zoo_olmoe tasks=rte data.root=null model.revision='1e5'",
        "model=tiny_olmoe method=token_reroute gamma=0 rounds=2 tasks=rte",
        "model=zoo_olmoe tasks=obqa backend=vllm max_num_batched_tokens=64",
        "tasks=piqa method=expanded_drop gamma=1.37 ep_size=2 candidates=ranked m=3 max_k=true "
        "protect_topk=true scope=sequence count_padding=true rounding=floor",
        "model=zoo_olmoe method=expanded_drop gamma=1.0 ep_size=1 scope=sequence",
        "model=zoo_olmoe apply_chat_template=true system_instruction='Be_brief.'",
    ],
)
def test_it_names_the_cell(words: str) -> None:
    cell = planned(*words.split())[0].cell
    assert again(cell) == cell


def test_sweeps_compute_the_cells_and_no_others() -> None:
    """Also where the experiment sets what its cells have in common, such as a limit."""
    words = ["grid.model=[zoo_olmoe,zoo_mixtral]", "grid.method=[baseline,random]", "gamma=1.5"]
    words += ["grid.seed=[0,1]", "tasks=[obqa,longicl_1]", "limit=4", "eval_seed=7"]
    cells = [plan.cell for plan in planned(*words)]
    commands = sweeps(cells, [*words[:2], "device=cpu", "limit=4"])
    assert len(commands) == 2, "one for the baseline, which has no seed"
    named = []
    for command in commands:
        program, _, *overrides = shlex.split(command)
        assert (program, "device=cpu" in overrides) == ("capmoe-eval", True)
        configs = map(compose_words, sweep_jobs(overrides))
        named += [plan.cell.digest for config in configs for plan in plans(config)]
    assert sorted({*named}) == sorted(cell.digest for cell in cells)


def test_a_command_has_no_knob_without_effect() -> None:
    """With one rank, candidates=local is candidates=global, which the command of a table named."""
    (plan,) = planned("method=expanded_drop", "gamma=1.0", "ep_size=1", "tasks=obqa")
    (command,) = sweeps([plan.cell], ["ep_size=1"])
    assert "candidates" not in command
    assert planned(*shlex.split(command)[2:])[0].cell == plan.cell


def test_a_model_of_ones_own_and_its_data(tmp_path: Path) -> None:
    cell = odd_cell(model='it\'s "mine" ~')
    assert again(cell, tmp_path) == cell


def test_a_task_that_no_longer_exists_has_no_command() -> None:
    assert cell_command(odd_cell(task="own_task"), "again") is None


@pytest.mark.parametrize(
    "value",
    ["null", "TRUE", "1e3", "12", "a b", 'q"', "back\\", 'x\\"', "ünï", "a,b", "{a}", "", "a:b"],
)
def test_texts_stay_texts(value: str) -> None:
    config = composed(["model=custom", "model.pretrained=x", override("model.name", value)])
    assert config.model.name == value


# Records of an engine's steps are cells of their own, and are mixed with no others.


VLLM = ("backend=vllm", "model=zoo_olmoe", "method=score", "gamma=1.0", "tasks=[obqa]")
STATIC = ("model=zoo_olmoe", "method=score", "gamma=1.0", "tasks=[obqa]", "ep_size=1")


def of(*overrides: str) -> Cell:
    return planned(*overrides)[0].cell


def test_an_engine_has_the_tokens_of_one_rank() -> None:
    assert of("model=zoo_olmoe").method.ep_size == 8
    assert of("model=zoo_olmoe", "backend=vllm").method.ep_size == 1
    grid = ("++grid.backend=[transformers,vllm]", "++grid.model=[zoo_olmoe]", "tasks=[obqa]")
    assert [plan.cell.method.ep_size for plan in planned(*grid)] == [8, 1]


def test_a_record_of_an_engine_has_its_steps(tmp_path: Path) -> None:
    engine = record(of(*VLLM), tmp_path)
    assert engine.server is not None
    assert engine.server.rows == [(64, 0, 2), (10, 2, 1)]
    with pytest.raises(ValueError, match="rows are not those of 4 steps"):
        EngineRun.model_validate(SERVER | {"steps": 4})


def test_a_table_is_of_one_backend(tmp_path: Path) -> None:
    words = (f"results_dir={tmp_path}", "model=zoo_olmoe")
    write_all(planned("experiment=table2", "++grid.model=null", *words), lambda _: (1, 1, 1, 1))
    engine = [*words, "backend=vllm"]
    empty = measured_table("table2", engine)
    assert empty.attrs["name"] == "table2_vllm"
    assert {"backend=vllm" in line for line in empty.attrs["commands"]} == {True}
    write_all(planned("experiment=table2", "++grid.model=null", *engine), lambda _: (1, 0, 0, 0))
    filled, static = (
        measured_table("table2", [*engine, "limit=null"]),
        measured_table("table2", words),
    )
    assert set(filled["value"]) == {25.0}
    assert set(static["value"]) == {100.0}
    assert filled.attrs["caption"].endswith("(backend=vllm).")
    assert (static.attrs["name"], "backend" in static.attrs["caption"]) == ("table2", False)
