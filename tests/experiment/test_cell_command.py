"""The command of a cell must name that cell and no other."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from capmoe_eval.experiment.cell import Cell
from capmoe_eval.experiment.commands import cell_command, sweeps
from capmoe_eval.experiment.composition import compose_words, composed, override
from capmoe_eval.experiment.configuration import plans
from capmoe_eval.experiment.datasource import DIRECTORY
from hydra_plugins.capmoe_sweeper import sweep_jobs
from tests.records import odd_cell, planned


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
        ["model=zoo_olmoe", "method=baseline", "tasks=piqa"],
        ["model=zoo_mixtral", "method=score", "gamma=inf", "tasks=gsm8k", "limit=40"],
        ["model=olmoe", "method=random", "seed=2", "tasks=mmlu", "dtype=float16"],
        ["model=zoo_olmoe", "method=expert_drop", "tasks=zero_shot_mix", "shuffle=1"],
        ["model=deepseek_v2_lite", "method=device_drop", "tasks=longicl_1", "eval_seed=1"],
        ["model=deepseek_v2_lite", "tasks=longicl_2", "tasks.longicl_2.batch_size=4"],
        ["model=zoo_olmoe", "tasks=obqa", "tasks.obqa.fewshot=3", "batch_size=1"],
        ["model=zoo_olmoe", "tasks=obqa", "data.root=miniworld", "model.max_length=64"],
        ["model=zoo_llava_olmoe", "tasks=easy_vqa", "modality=text_first"],
        ["tasks=mts_dialog"],
        [
            *("tasks=mts_dialog", "tasks.mts_dialog.metric=bertscore_f1"),
            *("tasks.mts_dialog.encoder=roberta-large", "tasks.mts_dialog.layer=17"),
        ],
        ["model=zoo_llava_olmoe", "tasks=easy_vqa", "tasks.easy_vqa.data_root=null"],
        ["model=zoo_llava_olmoe", "tasks=mme", "tasks.mme.dataset=lmms-lab-encoder/MME"],
        ["model=zoo_olmoe", "tasks=rte", "data.root=null", "model.revision='1e5'"],
        ["model=tiny_olmoe", "method=token_reroute", "gamma=0", "rounds=2", "tasks=rte"],
        ["model=zoo_olmoe", "tasks=obqa", "backend=vllm", "max_num_batched_tokens=64"],
        [
            *("model=zoo_olmoe", "tasks=piqa", "method=expanded_drop", "gamma=1.37", "ep_size=2"),
            *("candidates=ranked", "m=3", "protect_topk=true", "max_k=true", "scope=sequence"),
            *("count_padding=true", "rounding=floor"),
        ],
        ["model=zoo_olmoe", "method=expanded_drop", "gamma=1.0", "ep_size=1", "scope=sequence"],
        ["model=zoo_olmoe", "apply_chat_template=true", "system_instruction='Be brief.'"],
    ],
)
def test_it_names_the_cell(words: list[str]) -> None:
    cell = planned(*words)[0].cell
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
