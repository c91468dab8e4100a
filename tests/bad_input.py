"""Inputs that cannot be, as data: a command, its words, and what its one line must say.

Words are split as a shell does. They run in a directory that has an empty ``file``, a directory
``truncated`` and one ``columns`` in hub layout whose OpenBookQA is cut off or lacks a column,
``record.json``, which is no record, a directory ``pipes`` whose one record is a pipe, and
``gamma.yaml``, ``hf.yaml`` and ``folder.yaml``, options of lm-eval.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.satellites import HAS_METHODS, HAS_REPORT, HAS_ZOO

WHOLE = "must be a whole number"
FLAG = "must be true or false"
TEXT = "must be text"
NAME = "becomes a name in a path"
WRITE = "cannot be written"

MAIN: dict[str, str] = {
    # Names that become paths.
    "model.name=../../evil": NAME,
    "'model.name=\"a\\\\b\"'": NAME,
    "model.name=null": "model.name=null",
    f"'model.name=\"{'é' * 60}\"'": NAME,
    "profile.name=../evil": "profile.name=../evil",
    "'+tasks.../evil={lm_eval: piqa}'": "tasks",
    "data.root=truncated data.name=../evil": "data.name=../evil",
    "data.root=truncated data.name=hub": "stand for other documents",
    "data.root=null data.name=mine tasks=obqa": "data.name=mine: no directory has it",
    "data.root=DIRECTORY data.name=mine tasks=obqa": "data.name=mine: no directory has it; set",
    "results_dir=DIRECTORY/zoo": "results_dir=DIRECTORY/zoo: DIRECTORY stands for a directory",
    "data.root=DIRECTORY": "data.root=DIRECTORY: no such directory",
    "data.root=miniworld data.name=mine": "data.name=mine: data.root=miniworld has its own name",
    # Booleans.
    **{f"overwrite={word}": FLAG for word in ("no", "null")},
    "tasks=humaneval": "allow_code_execution=true",
    "max_k=no": f"max_k=no: {FLAG}",
    # Whole numbers.
    **{
        f"{key}={word}": f"{key}={word}: must be"
        for key in ("limit", "ep_size", "batch_size", "threads", "seed", "eval_seed", "shuffle")
        for word in ("-1", "1.5")
    },
    "ep_size=null": f"ep_size=null: {WHOLE}",
    "eval_seed=4294967296": WHOLE,
    "threads=100000": WHOLE,
    "batch_size=auto": WHOLE,
    "limit='\"4\"'": WHOLE,
    "model.max_length=0": "model.max_length=0",
    "tasks=obqa tasks.obqa.fewshot=-1": "tasks.obqa.fewshot=-1",
    # Numbers without a bound, which would overflow or never end.
    f"limit={'9' * 23}": "limit=999",
    f"gamma={'9' * 5000}": "gamma=999",
    f"model.pretrained=zoo:olmoe_s{'9' * 23} model.name=mine tasks=obqa": "=zoo:olmoe_s999",
    f"-m limit=1,{'9' * 5000}": "limit=1,999",
    # What Hydra itself does not check.
    "tasks=[obqa,[piqa]]": "tasks=[obqa,[piqa]]: ",
    "tasks=obqa,piqa": "error: tasks=obqa,piqa: is several values; write tasks=[obqa,piqa] for",
    "gamma=1.0,2.0": "capmoe-eval sweep gamma=1.0,2.0",
    "gamma = 1.0": "error: gamma: is no setting; write KEY=VALUE without spaces",
    "--gamma 1.0": "write a setting as KEY=VALUE",
    "'method=[score,order]'": "is a list; evaluate each by capmoe-eval sweep method=score,order",
    "tasks=mine": "tasks=FILE.yaml is a task of your own",
    "model=[[zoo_olmoe]]": "model=[[zoo_olmoe]]: ",
    "@x=1": "@x=1: ",
    "--shell-completion": "--shell-completion",
    "--experimental-rerun=file": "--experimental-rerun: would run what is pickled in a file",
    # The capacity factor.
    **{
        f"gamma={word}": f"gamma={word}: the capacity factor must be a number"
        for word in ("-0.001", "nan", "abc", "true", "{}")
    },
    "'gamma=\"\u0663\"'": "the capacity factor must be a number",
    "gamma=null": "gamma: method 'score' needs a capacity factor",
    "gamma=0.5:2.0:0.5": "give a comma list: capmoe-eval sweep gamma=0.5,1.0,1.5,2.0",
    **{f"'layer_gammas={word}'": "layer_gammas=" for word in ("[]", "1.0", "[1.0,-1]")},
    # Choices.
    **{f"{key}=null": f"{key}=null: choose one of" for key in ("method", "scope", "dtype")},
    "parallel=true": "parallel=true: choose one of",
    "method=scroe": "did you mean 'score'",
    "method=[score]": "method=['score']: ",
    "placement=null": "placement=null: must be",
    "tasks=obqa ~tasks.obqa.dataset": "field 'dataset' is missing",
    "parallel=ep": "needs one process per rank",
    "hydra/launcher=basic": "hydra/launcher=basic: starts the jobs of a sweep; add -m",
    "experiment=banking77 profile=tiny limit=1": "`capmoe-eval train banking77` makes them",
    # Text and paths.
    "results_dir=null": f"results_dir=null: {TEXT}",
    **{
        f"device={word}": f"device={word}: must be auto or a device: cpu, cuda"
        for word in ("null", "gpu", "cuda:x")
    },
    # Text that Hydra reads in quotes alone.
    "model.pretrained=odd/李明 model.name=x": """'model.pretrained="odd/李明"'""",
    "results_dir=~nobody/mine": """'results_dir="~nobody/mine"'""",
    "results_dir=file": WRITE,
    f"results_dir={'a' * 300}": "File name too long",
    # A mistyped /scratch is no directory in memory, or in a container, that is lost later.
    "results_dir=/nowhere/deep/results": "=/nowhere/deep/results: there is no /nowhere",
    "device_map=nope": "device_map=nope: must be auto, balanced",
    "data.root=file": "data.root=file: no such directory",
    "data.root=truncated tasks=piqa": "no dataset 'baber/piqa'",
    "data.root=truncated tasks=obqa": "tasks=obqa: ",
    "data.root=columns tasks=obqa": "no column 'question_stem'",
    "data=null": "data=null",
    "model.pretrained=null": "model.pretrained=null",
    "model.pretrained=zoo:nope model.name=mine tasks=obqa": "model.pretrained=zoo:nope: choose",
    "model.pretrained=tiny:olmo model.name=mine tasks=obqa": "did you mean 'tiny:olmoe'",
    "model.pretrained=/no/such model.name=mine tasks=obqa": "=/no/such: cannot be loaded",
    "model.pretrained=file model.name=mine tasks=obqa": "model.pretrained=file: cannot be loaded",
    # A name that stands for other weights.
    **{
        f"{words} tasks=obqa": f"model={name} names its own weights, "
        for words, name in (
            ("model.pretrained=/my/model", "zoo_olmoe"),
            ("model=custom model.name=olmoe model.pretrained=tiny:olmoe", "olmoe"),
        )
    },
    "model.tokenizer=42": "model.tokenizer=42",
    "model.tokenizer=/no/such tasks=obqa": "model.tokenizer=/no/such: cannot be loaded",
    "tasks=obqa tasks.obqa.lm_eval=null": "tasks.obqa.lm_eval=null",
    "tasks=obqa tasks.obqa.lm_eval=openbook": "did you mean 'openbookqa'",
    "tasks=obqa tasks.obqa.dataset=nowhere/at_all": "no dataset 'nowhere/at_all'",
    "tasks=gsm8k tasks.gsm8k.filter=flexible": "did you mean 'exact_match,flexible-extract'?",
    "tasks=obqa tasks.obqa=null": "tasks.obqa=null",
    "attention=flash_attention_2 tasks=obqa": "flash_attention_2: this model cannot use it here",
    "tasks.obqa.fewshot=5000 tasks=obqa": "tasks.obqa.fewshot=5000: openbookqa has ",
    "layer_gammas=[1,2] tasks=obqa": "layer_gammas: 2 capacity factors for 4 MoE layers",
    "layer_gammas=[1,1] tasks=obqa": "layer_gammas: 2 capacity factors for 4 MoE layers",
    "ep_size=7 tasks=obqa": "ep_size=7: 64 experts cannot be spread evenly over 7 ranks",
    # Groups and keys.
    "tasks=[]": "tasks=",
    "tasks=obqq": "did you mean 'obqa'",
    "tasks=arc_easy": "tasks=arc_easy: choose one of",
    "tasks=../model/olmoe": "tasks.name=olmoe",
    "model=tiny_olmo": "model=tiny_olmo: did you mean 'tiny_olmoe'?",
    "model=smollm2_moe tasks=obqa": "smollm2_moe has no checkpoint; run `make real`",
    "model=null": "model",
    "model=custom": "model.name: has no value; set model.name=",
    "model=custom model.name=x": "model.pretrained",
    "model=mine": "model=custom model.name=NAME model.pretrained=PATH",
    "method=token_drop": "method=token_drop: Token Drop is method=score",
    "-m method=score,order gama=1.0": "key=gama: did you mean 'gamma'",
    "method=score,order": "is several values; evaluate each by capmoe-eval sweep method=",
    "gamma=[0.5,1.0]": "gamma=[0.5,1.0]: must be one capacity factor; evaluate each by ",
    "gamma=1.0, 2.0": "gamma=1.0,: cannot be read; each setting is one word",
    "gama=1.0": "key=gama: did you mean 'gamma'",
    "model.nam=x": "model=nam: did you mean 'name'",
    "tasks=obqa tasks.obqa.fewshots=3": "tasks=fewshots: did you mean 'fewshot'",
    "tasks=mts_dialog tasks.mts_dialog.metric=bertscore_f1": "metric=bertscore_f1: needs",
    "tasks=mts_dialog tasks.mts_dialog.layer=3": "tasks.mts_dialog.layer=3: is of an encoder; name",
    "tasks=mts_dialog tasks.mts_dialog.encoder=/x tasks.mts_dialog.layer=2": "encoder=/x",
    "~batch_size": "~batch_size: a setting cannot be deleted; leave it out",
    "~device tasks=obqa": "~device: a setting cannot be deleted",
    "gamma": "gamma",
    "--nope": "--nope",
    "--config-name nope": "nope",
    # What Hydra takes: a new key by force, and the last of two values.
    "+gama=1.0": "key=gama: did you mean 'gamma'",
    "gamma=1.0 gamma=2.0": "gamma=2.0: gamma is set before, by gamma=1.0; leave one out",
    f"gamma={'[' * 500}{']' * 500}": "maximum recursion depth exceeded",
    "x" * 10_000: f"error: {'x' * 100}…: is no setting",
    f"limit=[{'x' * 10_000}": f"error: limit=[{'x' * 93}…: has no closing bracket",
    "method=mine": "a method of your own needs its package installed",
    # Grids.
    "grid=null": "grid=null: must be keys with lists of values",
    "grid.gamma=[]": "grid.gamma=[]: must be a list of values",
    "grid.gamma=[1.0,abc]": "gamma=abc: the capacity factor",
    "grid.gama=[1.0]": "key=gama: did you mean 'gamma'",
    "grid.model=[[zoo_olmoe]]": "model=['zoo_olmoe']: ",
    "grid.tasks=[nope]": "grid.tasks=nope",
    "grid.overwrite=[no]": f"overwrite=no: {FLAG}",
    "parts.a.nope=[1]": "parts.a=nope",
    "experiment=table1 gamma=1": "gamma=1: gamma is set by the experiment's grid",
    # Engines.
    **{
        f"backend=vllm {words}": line
        for words, line in {
            "ep_size=8": "ep_size=8: an engine has the tokens of one rank",
            "scope=sequence": "scope=sequence: an engine",
            "count_padding=true": "count_padding=true: a server's padding rows take no slot",
            "parallel=ep": "parallel=ep: is of transformers",
            "device_map=auto": "device_map=auto: is of transformers",
            "attention=eager": "attention=eager: is of transformers",
            "max_num_batched_tokens=null": "max_num_batched_tokens=null: decides which tokens",
            "max_num_batched_tokens=15": "must be at least batch_size=64, which is max_num_seqs",
            "model=zoo_llava_olmoe tasks=mme": "mme: asks about images",
        }.items()
    },
    **({} if find_spec("vllm") else {"backend=vllm": "pip install 'capmoe-serve[vllm]'"}),
    "backend=sglang": "choose one of transformers, vllm",
    **{
        f"-m hydra/launcher={option} gamma=1.0,2.0": f"pip install {words}"
        for option, plugin, words in (
            ("slurm", "submitit", "'capmoe-eval[slurm]'"),
            ("joblib", "joblib", "'capmoe-eval[joblib]'"),
            ("ray", "ray", "hydra-ray-launcher"),
        )
        if not find_spec(f"hydra_plugins.hydra_{plugin}_launcher")
    },
    # Models.
    "device=cuda:99 tasks=obqa": "device=cuda:99: not usable here",
    "model.pretrained=zoo:mixtral_s9 model.name=x tasks=obqa": "train mixtral_s9",
    # Forecasts.
    "plan=maybe": FLAG,
    "-m hydra.sweeper.max_batch_size=0 gamma=1.0,2.0": "hydra.sweeper.max_batch_size=0: must be",
    # Sweeps.
    **{
        f"-m '{word}'": f"{word}: must be a range of 1 to 100000 values"
        for word in ("gamma=range(1,0)", "limit=range(0,1000000000)")
    },
}
METHODS: dict[str, str] = {
    "gamma=adaptive": "gamma=adaptive: needs the share that may be dropped, for example budget",
    "budget=0.05": "budget=0.05: is of gamma=adaptive",
    "gamma=adaptive budget=1": "budget=1: must be a number above 0 and below 1",
    "gamma=adaptive budget=0.1 budget_of=tokens": "budget_of=tokens: choose one of",
    "backend=vllm gamma=adaptive budget=0.2": "needs a calibration",
    "method=sere k0=0": "k0=0: with SERE every token keeps its best expert",
    "method=sere gamma=adaptive budget=0.1": "method 'sere' has no capacity factor",
    "method=sere min_similarity=-0.1": "min_similarity=-0.1: must be a number of at least",
    "placement=eplb granularity=device gamma=adaptive budget=0.1": "placement=eplb: gamma=adaptive",
    "placement=eplb granularity=device parallel=ep": "placement=eplb: under parallel=ep",
    "method=macs": "method=macs: obqa asks about no images, whose tokens it weighs",
    "method=macs tasks=mme rho=3": "rho=3: must be a number from 0 to 2",
}
"""Those of packages/capmoe-methods."""

REPORTS: Mapping[str, Mapping[str, str]] = {
    "pack": {
        "results_dir=nowhere": "results_dir=nowhere: no results directory with records; name one",
        "zoo": "zoo: no results directory with records; name one with results_dir=DIR",
    },
    "table": {
        "nosuch": "table=nosuch",
        "no/such": "no/such: no such directory",
        "tabel2": "did you mean 'table2'",
        "": "required",
        "table2 --out file": f"--out=file: {WRITE}",
        "table2 --published v3": "--published=v3",
        "table2 profile.seeds=5": "profile.seeds=5: must be a list",
        "table2 --bench nowhere": "--bench=nowhere: no such directory",
        "table1 profile=real tasks=obqa": "tasks=obqa: tasks is set by the experiment's grid",
        "table2 out=mine": "out=mine: is an option; write --out=mine",
        "table2 experiment=table1": "experiment=table1: what is reported says which",
        "table2 plan=true": "plan=true: plans a run, and this command computes nothing; leave",
        "table2 results_dir=/nonexistent": "results_dir=/nonexistent: no such directory",
        "table2 model=custom model.name=a model.pretrained=b model.profile=../c": "model.profile=",
        "table2 model.name=mine": "model.name=mine: model is set by the experiment's grid",
        "table3_v1": "choose one of",
        "table3 --published v1": "version=v1: choose one of v2",
        "table4 profile.images=[]": "profile=zoo: has no model for this experiment; choose",
    },
    "figure": {
        "fig99": "fig99",
        "no/such": "no/such: no such directory",
        "fig1,fgi2": "did you mean 'fig2'",
        "fig16 profile.figures.models=[zoo_olmoe]": "fig16: shows model 4 of the profile",
        "fig12 tasks=piqa": "parts.curve.tasks=obqa: choose one of piqa; tasks= leaves out what",
        "fig12 parts.curve.tasks=[rt]": "parts.curve.tasks=rt: did you mean 'rte'",
        "": "required",
        "fig7 --out file": f"--out=file: {WRITE}",
        "fig7 --formats bmp": "--formats=bmp",
        "fig7": "fig7",
        "fig7 plan=true": "plan=true: plans a run",
    },
    "train": {
        "": "required",
        "olmoe --card --origins": "not allowed with",
        "olmo": "did you mean 'olmoe'",
        "olmoe_s٣": "name=olmoe_s٣",
        "../evil --card": "name=../evil",
        "olmoe --steps 0": f"--steps=0: {WHOLE}",
        "olmoe --out file": f"--out=file: {WRITE}",
        "olmoe --card --out file": WRITE,
        "olmoe --origins": "not upcycled",
        "mixtral --origins --out record.json --steps 9": "record.json",
    },
}
"""Those of the suite, and of packages/capmoe-zoo."""
CLAIMS: Mapping[str, Mapping[str, str]] = {
    "claims": {
        "--out file": f"--out=file: {WRITE}",
        "profile=": "profile=: choose one of fresh, paper",
        "profile=tiny profile=zoo": "profile is set before",
        "results_dir=pipes": "results_dir=pipes: no whole record there",
        "gamma=1.0": "key=gamma",
        "results_dir=nowhere": "no such directory",
        "nope": "key=nope: choose one of profile, results_dir",
    },
    "export": {
        "": "results_dir=DIR",
        "results_dir=nowhere --parquet a": "results_dir=nowhere: no results directory with records",
        "results_dir=pipes": "export: names nothing to write; add --lm-eval OUT or --parquet FILE",
        "results_dir=pipes --parquet .": "--parquet=.: cannot be written",
        "results_dir=pipes --parquet /nowhere/x": "--parquet=/nowhere/x: there is no /nowhere",
        "results_dir=pipes --lm-eval file": f"--lm-eval=file: {WRITE}",
        "results_dir=pipes --lm-eval ''": "must be a path",
        **{
            f"results_dir=pipes --lm-eval pipes{below}": "is in the results directory"
            for below in ("", "/exported", "/../pipes/exported")
        },
    },
    "replicate": {
        "": "no finished contrast of experiment=replicate",
        "profile=fresh": "the settings of the records that `capmoe-eval table results/fresh` shows",
        "experiment=table1": "experiment=table1",
        "gamma=1": "gamma=1",
        "--out ''": "must be a path",
    },
    "report": {
        "--out file": f"--out=file: {WRITE}",
        "profile=tinny": "did you mean 'tiny'",
        "profile.name=../evil": "profile.name=../evil",
        "experiment=table1": "experiment=table1",
        "gama=1": "did you mean 'gamma'",
        "results_dir=resutls/zoo": "results_dir=resutls/zoo: no whole record there",
        "results_dir=pipes --all": "results_dir=pipes: no whole record there",
        "'results_dir=[a]'": "results_dir=['a']: must be",
        "--bench=none": "--bench=none: no such directory",
        "--nope": "--nope",
    },
}
"""Those of packages/capmoe-report."""
_RUN = "run --model capmoe --tasks piqa --model_args"
LM_EVAL: Mapping[str, str] = {
    "run --model capmoe": "No tasks specified",
    f"{_RUN} pretrained=x,method=scroe": "did you mean 'score'",
    f"{_RUN} pretrained=x,method=score": "gamma: method 'score' needs",
    f"{_RUN} pretrained=x,method=score,gamma=True": "gamma=true",
    f"{_RUN} pretrained=x,gamma=1": "gamma: has no effect without a method; add method=score",
    "run -M capmoe -t piqa -a pretrained=x gamma=1": "gamma: has no effect without a method",
    "run --config gamma.yaml": "gamma: has no effect without a method; add method=score",
    "run --config hf.yaml": "--model hf: has no gamma",
    "run --config folder.yaml": "--include_path=/no/such: no such directory",
    f"{_RUN} pretrained=x,method=score,gama=1": "gama: did you mean 'gamma'?",
    f"{_RUN} pretrained=x --include_path /no/such": "--include_path=/no/such: no such directory",
    f"{_RUN} pretrained=x,method=score,gamma=1,max_k=no": f"max_k=no: {FLAG}",
    f"{_RUN} pretrained=/no/such,batch_size=4": "batch_size=4: is an option of lm-eval",
    f"{_RUN} pretrained=/no/such": "/no/such",
    f"{_RUN} pretrained=zoo:olmoe": "which lm-eval's command line cannot load",
    f"{_RUN} pretrained=tiny:mixtral,gamma=1.0": "capmoe-eval run model=tiny_mixtral tasks=NAME",
    f"{_RUN} method=baseline": "pretrained",
    f"{_RUN} pretrained=/no/such --batch_size -4": "batch_size=-4",
    f"{_RUN} pretrained=/no/such --config nowhere.yaml": "nowhere.yaml",
    "run --model capmoe --tasks capmoe_humanevel,x --model_args pretrained=x": "capmoe_humaneval",
    "run --model capmo --tasks piqa": "capmo",
}


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield every command, its words, and what its line must say."""
    run = MAIN | (METHODS if HAS_METHODS else {})
    reports = {**REPORTS, **(CLAIMS if HAS_REPORT else {})}
    for command, table in {"run": run, **reports, "lm-eval": LM_EVAL}.items():
        for words, said in table.items():
            if command != "train" or HAS_ZOO:
                yield command, words, said


def refusal(
    main: Callable[[Sequence[str]], object],
    words: Sequence[str],
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Return the one line that a command line is refused with, by status 2, writing nothing.

    lm-eval logs before its line; what it did not expect is in a temporary file.
    """

    def sizes() -> dict[Path, int]:
        return {path: path.stat().st_size for path in place.parent.rglob("*") if path.is_file()}

    before = sizes()
    with pytest.raises(SystemExit) as done:
        sys.exit(main(words))  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    is_of_lm_eval = "lm-eval" in words[:1]
    assert (done.value.code, "" if is_of_lm_eval else out) == (2, ""), err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line]
    (line,) = lines[-1:] if is_of_lm_eval else lines
    assert line.startswith("error: ")
    assert len(line) < 2_000
    if is_of_lm_eval:
        for path in re.findall(r"/\S+/capmoe_eval-[\w-]+\.txt", err):
            Path(path).unlink()
    assert sizes() == before
    return line
