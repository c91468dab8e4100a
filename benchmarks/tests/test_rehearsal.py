"""The rehearsal: the paper's models as the hub has them, and every method on them, made small."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from capmoe_eval.bench.command import main
from capmoe_eval.bench.ep.layer import find_shape
from capmoe_eval.errors import UsageError
from capmoe_eval.evaluation.loading import load_lm, weightless
from capmoe_eval.evaluation.workload import CellWork
from capmoe_eval.experiment.composition import load_option
from capmoe_eval.experiment.configuration import DeviceConfig
from capmoe_eval.results.timings import read_evaluation, targets
from capmoe_eval.routing.registry import method_names
from safetensors import safe_open
from tests.pages import rehearsal
from tests.satellites import NEEDS_METHODS
from tests.wrapper.molmoe.checkpoint import remote
from tests.wrapper.molmoe.remote_code import CONFIG

from capmoe_benchmarks.rehearsal import checkpoint, command
from capmoe_benchmarks.rehearsal.checkpoint import PUBLISHED, Checkpoint
from capmoe_benchmarks.rehearsal.grid import H100, Sizes
from tests import records

# The shapes of bench/ep/shapes.yaml, and the published numbers of active parameters, in billions.
SHAPES = {
    "olmoe": ("olmoe", 1.3),
    "qwen1_5_moe": ("qwen1_5_moe", 2.7),
    "deepseek_v2_lite": ("deepseek_v2_lite", 2.4),
    "mixtral_8x7b_instruct": ("mixtral", 12.9),
    "qwen3_30b_a3b": ("qwen3_30b", 3.3),
    "molmoe": ("olmoe", 1.5),
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size": 1500,
}


def small_config(config: dict[str, Any]) -> dict[str, Any]:
    """A published configuration with small widths and every other field as it is."""
    if config["model_type"] == "molmo":
        small = {key: CONFIG[key] for key in ("d_model", "n_heads", "mlp_ratio", "vit_layers")}
        vision = CONFIG["vision_backbone"] | {"image_patch_size": 14}  # a processor's own patches
        sizes = {"vocab_size": 1500, "embedding_size": 1536, "additional_vocab_size": 8}
        return config | small | sizes | {"vision_backbone": vision}
    return config | {key: size for key, size in SMALL.items() if key in config}


@pytest.fixture(name="small")
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [dataclasses.replace(each, config=small_config(each.config)) for each in PUBLISHED]
    monkeypatch.setattr(checkpoint, "PUBLISHED", tuple(small))


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: each.models[0])
def test_the_fields_give_the_published_sizes(tmp_path: Path, published: Any) -> None:
    name = published.models[0]
    made = Checkpoint(name, tmp_path / name)
    assert sum(2 * math.prod(shape) for shape in made.tensors().values()) == published.total_size
    shape_name, active = SHAPES[name]
    sizes, shape = Sizes.of(made), find_shape(shape_name)
    config = weightless(made.model).config.get_text_config()
    assert config.hidden_size == shape.hidden
    assert config.num_experts_per_tok == shape.top_k
    widths = [getattr(config, "moe_intermediate_size", None), config.intermediate_size]
    assert next(width for width in widths if width) == shape.intermediate
    # The published numbers are rounded, and some leave the input embeddings out, others do not.
    embedded = sizes.active + config.vocab_size * config.hidden_size
    assert sizes.active / 1e9 - 0.1 < active < embedded / 1e9 + 0.1


def test_every_model_of_the_paper_is_published() -> None:
    names = [name for each in PUBLISHED for name in each.models]
    paper = [path.stem for path in Path("conf/model").glob("*.yaml")]
    assert sorted(names) == sorted(n for n in paper if load_option("model", n).profile == "paper")


@NEEDS_METHODS
def test_every_method_is_rehearsed_on_every_model() -> None:
    plans = records.planned("experiment=rehearsal")
    of_model: dict[str, set[str]] = {}
    for plan in plans:
        method = plan.cell.method
        name = "device_drop" if method.granularity == "device" else method.name
        of_model.setdefault(plan.cell.model.name, set()).add(name)
    images = of_model.pop("molmoe")
    assert images == {"baseline", "score", "expanded_drop", "macs"}
    assert len(of_model) == 8
    for methods in of_model.values():
        assert methods | {"macs"} == set(method_names())


def test_the_names_of_tensors_are_the_hubs(tmp_path: Path, monkeypatch: Any) -> None:
    """MolmoE's as its own code has them; the experts' of the others as in their checkpoints."""
    names = {
        "olmoe": "model.layers.0.mlp.experts.63.gate_proj.weight",
        "qwen1_5_moe": "model.layers.0.mlp.experts.59.up_proj.weight",
        "deepseek_v2_lite": "model.layers.1.mlp.experts.63.down_proj.weight",
        "mixtral_8x7b_instruct": "model.layers.0.block_sparse_moe.experts.7.w1.weight",
        "qwen3_30b_a3b": "model.layers.0.mlp.experts.127.gate_proj.weight",
    }
    for name, tensor in names.items():
        assert tensor in Checkpoint(name, tmp_path / name).tensors()
    molmoe = dataclasses.replace(PUBLISHED[-1], config=CONFIG)
    monkeypatch.setattr(checkpoint, "PUBLISHED", (molmoe,))
    _, shapes = remote()
    assert Checkpoint("molmoe", tmp_path / "molmoe").tensors() == shapes


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [each.models[-1] for each in PUBLISHED])
def test_a_checkpoint_is_in_shards_and_loads_whole(tmp_path: Path, name: str) -> None:
    made = Checkpoint(name, tmp_path / name)
    whole = sum(2 * math.prod(shape) for shape in made.tensors().values())
    made.cut(whole / 3)
    assert 1 <= made.layers < made.published_layers
    stored, shards = made.write_weights()
    assert stored <= whole / 3
    index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / name).glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert len(files) == shards >= 3
    for file in files:
        with safe_open(tmp_path / name / file, "pt") as content:
            assert {index["weight_map"][key] for key in content.keys()} == {file}  # noqa: SIM118
    lm = load_lm(made.model, DeviceConfig("cpu"))
    assert sum(2 * weight.numel() for weight in lm.model.parameters()) == stored
    assert bool(lm.tokenizer.chat_template) == name.endswith(("_chat", "_instruct"))


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    made = Checkpoint("deepseek_v2_lite", tmp_path / "model")
    with pytest.raises(UsageError, match=r"--memory=1: deepseek_v2_lite needs 2\.0 GiB for its"):
        made.cut(2**30)
    assert made.layers == 27


def rehearse(out: Path, model: str, *words: str) -> dict[str, Any]:
    few = ("data.root=miniworld", "limit=2", "device=cpu", "--memory", "0.001", "--new", "3")
    with pytest.raises(SystemExit) as done:
        places = ("--out", str(out), "--dir", str(out))
        main(["rehearsal", *words, *few, "--models", model, *places])
    assert not done.value.code
    content: dict[str, Any] = json.loads((out / "rehearsal.json").read_text())
    assert len(targets(read_evaluation(out / "rehearsal.json"))) == len(content["targets"])
    assert [path.name for path in out.iterdir()] == ["rehearsal.json"], "models were left"
    return content


@pytest.mark.usefixtures("small")
def test_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that runs is measured beside its forecast; one that fails is counted, and says why."""
    evaluated = command.evaluate

    def evaluate(cell: Any, *args: Any, **kwargs: Any) -> Any:
        if cell.method.granularity == "device":
            raise RuntimeError("no kernel")
        return evaluated(cell, *args, **kwargs)

    monkeypatch.setattr(command, "evaluate", evaluate)
    few = ("parts.methods.method=[baseline,score]", "parts.calibrated.method=[order]")
    content = rehearse(tmp_path, "olmoe_instruct", "parts.readings.method=[score]", *few)
    (row,) = content["models"]
    assert row["weights"] == row["loaded"] == row["stored"]
    *cells, failed, order = row["cells"]
    assert [cell["method"] for cell in cells] == ["baseline", "score-g1-ep8"] * 2
    assert failed["failure"].startswith("RuntimeError: no kernel (test_rehearsal.py, line ")
    for cell in (*cells, order):
        assert cell["seconds"] > 0
        assert (cell["drop_rate"] > 0) == (cell["method"] != "baseline")
    for baseline in cells[::2]:
        # In a model this narrow, what is in float32 is a larger part than in a wide one.
        assert baseline["bytes"] == pytest.approx(baseline["bytes_forecast"], rel=0.25)
    (missed,) = [target for target in content["targets"] if target["met"] is False]
    assert missed["name"] == "olmoe_instruct: cells that failed"
    assert missed["ratio"]["median"] == 1


@pytest.mark.nightly
@pytest.mark.usefixtures("small")
def test_every_method_runs_and_the_file_keeps_other_models(tmp_path: Path) -> None:
    rehearse(tmp_path, "molmoe", "parts.images.method=[baseline,score,expanded_drop]")
    content = rehearse(tmp_path, "deepseek_v2_lite_chat")
    assert [row["model"] for row in content["models"]] == ["deepseek_v2_lite_chat", "molmoe"]
    cells = [cell for row in content["models"] for cell in row["cells"]]
    assert [cell["failure"] for cell in cells if "failure" in cell] == []
    assert len(cells) == (2 * 12 + 2 + 1) + 3


def test_the_time_of_a_cell_is_of_what_takes_longest() -> None:
    machine = dataclasses.replace(
        H100, flops=4e6, compute_share=0.25, bandwidth=2e3, bandwidth_share=0.5, layer_seconds=1
    )
    sizes = Sizes(weights=1000, active=40, layers=2, width=10)
    # 10⁶ tokens × (2 · 40 + 2 · 10 · 46) operations, 10⁶ a second
    work = CellWork(4, 4, tokens=10**6, longest=46)
    assert sizes.seconds(work, 2, machine) == pytest.approx(1000)
    assert sizes.seconds(dataclasses.replace(work, tokens=1), 2, machine) == 4
    slow = dataclasses.replace(machine, bandwidth=200.0)
    assert sizes.seconds(dataclasses.replace(work, tokens=1), 2, slow) == 2 * 10
    answers = dataclasses.replace(work, tokens=1, new_tokens=6)
    assert sizes.seconds(answers, 2, machine) == 4 + 3 * 2


def test_the_page_is_that_of_the_file() -> None:
    written = rehearsal.DOCUMENT.read_text(encoding="utf-8")
    assert written == rehearsal.text(), "write it: make pages"
