"""Inputs that cannot be, as data: a command, its words, and what its one line must say.

Words are split as a shell does. They run in a directory that has an empty ``file``, a directory
``truncated`` and one ``columns`` in hub layout whose OpenBookQA is cut off or lacks a column,
``record.json``, which is no record, and ``traces`` (:func:`write_traces`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch


class Row(NamedTuple):
    """A command line and what its one line of error must say."""

    command: str
    words: str
    said: str


WHOLE = "must be a whole number"
FLAG = "must be true or false"
TEXT = "must be text"
NAME = "becomes a name in a path"
WRITE = "cannot be written"
REAL = "must be a finite number"

MAIN: Mapping[str, str] = {
    # Names that become paths.
    "model.name=../../evil": NAME,
    "model.name=/tmp/evil": NAME,
    "model.name=a/b": NAME,
    "'model.name=\"a\\\\b\"'": NAME,
    "model.name=..": NAME,
    "model.name=.hidden": NAME,
    "'model.name=\"\"'": NAME,
    "'model.name=\" \"'": NAME,
    "'model.name=\"a\nb\"'": NAME,
    "'model.name=\"a\tb\"'": NAME,
    "model.name=null": "model.name=null",
    "model.name=42": "model.name=42",
    "model.name=true": "model.name=true",
    "model.name=[a]": "model.name=",
    f"model.name={'a' * 101}": NAME,
    f"'model.name=\"{'é' * 60}\"'": NAME,
    "model.profile=../evil": "model.profile=../evil",
    "model.profile=null": "model.profile=null",
    "profile.name=../evil": "profile.name=../evil",
    "profile.name=null": "profile.name=null",
    "'+tasks.../evil={lm_eval: piqa}'": "tasks",
    "data.root=truncated data.name=../evil": "data.name=../evil",
    "data.root=truncated data.name=.x": "data.name=.x",
    "data.root=truncated data.name=42": "data.name=42",
    "data.root=truncated data.name=hub": "stand for other documents",
    "data.root=truncated data.name=miniworld": "stand for other documents",
    # Booleans.
    **{f"overwrite={word}": FLAG for word in ("no", "off", "yes", "on", "0", "1", "null", "[]")},
    "overwrite='\"false\"'": FLAG,
    "allow_code_execution=yes": FLAG,
    "tasks=humaneval": "allow_code_execution=true",
    "save_trace=file": f"save_trace=file: {WRITE}",
    "save_trace=true": "save_trace=true: must be text",
    **{f"trace_tokens={word}": "trace_tokens=" for word in ("0", "1.5", "null", "abc")},
    **{
        f"{knob}={word}": f"{knob}={word}: {FLAG}"
        for knob in ("protect_topk", "max_k", "count_padding")
        for word in ("no", "1", "null", "abc", "0.5")
    },
    # Whole numbers.
    **{
        f"{key}={word}": f"{key}={word}: must be"
        for key in ("ep_size", "m", "rounds", "batch_size", "limit", "threads")
        for word in ("0", "-1", "1.5", "true", "abc", "1.0")
    },
    **{
        f"{key}={word}": f"{key}={word}: must be"
        for key in ("seed", "eval_seed", "shuffle")
        for word in ("-1", "1.5", "true", "abc", "1.0")
    },
    **{f"{key}=null": f"{key}=null: {WHOLE}" for key in ("ep_size", "m", "rounds", "seed")},
    "eval_seed=null": WHOLE,
    "eval_seed=4294967296": WHOLE,
    "seed=99999999999999999999": WHOLE,
    "shuffle=99999999999999999999": "must be a seed",
    "threads=100000": WHOLE,
    "batch_size=null": WHOLE,
    "batch_size=[]": WHOLE,
    "batch_size=auto:0": WHOLE,
    "batch_size=automatic": WHOLE,
    "batch_size=auto": "under a capacity",
    "method=baseline batch_size=auto shuffle=1": "need a number",
    "limit=[]": "whole number of documents",
    "limit='\"4\"'": "whole number of documents",
    "model.max_length=0": "model.max_length=0",
    "model.max_length=abc": "model.max_length=abc",
    "model.max_length=true": "model.max_length=true",
    "model.ep_size=0": "ep_size=0",
    "model.gamma=abc": "gamma=abc",
    "model.threads=0": "threads=0",
    "tasks=obqa tasks.obqa.fewshot=-1": "tasks.obqa.fewshot=-1",
    "tasks=obqa tasks.obqa.fewshot=true": "tasks.obqa.fewshot=true",
    "tasks=obqa tasks.obqa.fewshot=1.0": "tasks.obqa.fewshot=1.0",
    "tasks=obqa tasks.obqa.fewshot=abc": "tasks.obqa.fewshot=abc",
    "tasks=obqa tasks.obqa.batch_size=0": "tasks.obqa.batch_size=0",
    "tasks=obqa tasks.obqa.batch_size=true": "tasks.obqa.batch_size=true",
    # Numbers without a bound, which would overflow or never end.
    **{
        f"{key}={word}": f"{key}={word[:80]}"
        for key in ("limit", "batch_size", "ep_size", "m", "rounds", "seed", "eval_seed", "threads")
        for word in ("9" * 23, "9" * 400, "9" * 5000)
    },
    **{f"{key}={'9' * 23}": f"{key}=999" for key in ("shuffle", "k0", "trace_tokens", "delta")},
    f"model.max_length={'9' * 23}": "model.max_length=999",
    f"tasks=obqa tasks.obqa.fewshot={'9' * 23}": "tasks.obqa.fewshot=999",
    f"method=sere min_similarity={'9' * 400}": "min_similarity=999",
    f"gamma={'9' * 400}": "gamma=999",
    f"gamma={'9' * 5000}": "gamma=999",
    f"shard=1/{'9' * 23}": "shard=1/999",
    f"shard=1/{'9' * 5000}": "shard=1/999",
    f"model.pretrained=zoo:olmoe_s{'9' * 23} tasks=obqa": "model.pretrained=zoo:olmoe_s999",
    f"-m limit=1,{'9' * 23}": "limit=999",
    f"-m limit=1,{'9' * 5000}": "limit=1,999",
    f"grid.limit=[{'9' * 23}]": "limit=999",
    f"grid.limit=[{'9' * 5000}]": "limit=[999",
    # What Hydra itself does not check.
    "tasks=[obqa,[piqa]]": "tasks=[obqa,[piqa]]: ",
    "model=[[zoo_olmoe]]": "model=[[zoo_olmoe]]: ",
    "@x=1": "@x=1: ",
    "tasks@=1": "tasks@=1: ",
    "-m tasks=[obqa,[piqa]] gamma=1.0,2.0": "tasks=[obqa,[piqa]]: ",
    "--resolve": "--resolve",
    "--shell-completion": "--shell-completion",
    "--experimental-rerun=file": "--experimental-rerun: would run what is pickled in a file",
    "--experimental-rerun file": "--experimental-rerun: would run",
    "--exp=file": "--experimental-rerun: would run",
    # The capacity factor.
    **{
        f"gamma={word}": f"gamma={said}: the capacity factor must be a number"
        for word, said in (
            *((word, word) for word in ("-1", "-0.001", "-inf", "nan", "abc", "true", "[]")),
            ("[1.0]", "[1.0]"),
            ("{}", "{}"),
        )
    },
    "gamma=-2": "gamma=-2: the capacity factor must be a number of at least 0",
    "gamma=null": "gamma: method 'score' needs a capacity factor",
    "gamma=adaptive": "gamma=adaptive: needs the share that may be dropped, for example budget",
    "budget=0.05": "budget=0.05: is of gamma=adaptive",
    **{
        f"gamma=adaptive budget={word}": f"budget={word}: must be the share that may be dropped"
        for word in ("0", "1", "-0.1", "1.5", "true", "abc", "[]")
    },
    "gamma=adaptive budget=0.1 budget_of=tokens": "budget_of=tokens: choose one of",
    **{
        f"method={name} gamma=adaptive budget=0.1": f"method '{name}' has no capacity factor"
        for name in ("baseline", "expert_drop")
    },
    "'layer_gammas=[1.0,2.0]' gamma=adaptive budget=0.1": "gamma=adaptive chooses them",
    **{
        f"'layer_gammas={word}'": "layer_gammas="
        for word in ("[]", "1.0", "[a]", "[1.0,-1]", "[true]")
    },
    "method=baseline gamma=abc": "gamma=abc: the capacity factor",
    # Choices.
    **{
        f"{key}={word}": f"{key}={word}: choose one of"
        for key, word in (
            *((key, "null") for key in ("method", "scope", "candidates", "granularity", "dtype")),
            ("modality", "null"),
            *((key, "7") for key in ("method", "scope", "rounding", "decode", "renormalize")),
            *((key, "true") for key in ("parallel", "dtype", "decode")),
        )
    },
    "method=scroe": "did you mean 'score'",
    "method=ser": "did you mean 'sere'",
    "method=sere k0=0": "k0=0: with SERE every token keeps its best expert",
    "method=sere gamma=adaptive budget=0.1": "method 'sere' has no capacity factor",
    **{
        f"method=sere min_similarity={word}": f"min_similarity={word}: must be a number of at least"
        for word in ("-0.1", "abc", "true", "[]")
    },
    "'method=\"\"'": "method=: choose one of",
    "method=[score]": "method=['score']: ",
    "scope=bach": "did you mean 'batch'",
    "candidates=globl": "did you mean 'global'",
    "granularity=experts": "did you mean 'expert'",
    "placement=epbl": "did you mean 'eplb'",
    "placement=null": "placement=null: choose one of",
    "placement=eplb method=macs tasks=mme": "placement=eplb: macs reroutes within the blocks of",
    "placement=eplb granularity=device gamma=adaptive budget=0.1": "placement=eplb: gamma=adaptive",
    "placement=eplb granularity=device parallel=ep": "placement=eplb: under parallel=ep every",
    "method=macs": "method=macs: obqa asks about no images, whose tokens it weighs",
    "method=macs gamma=adaptive budget=0.1": "gamma=adaptive: chooses by numbers of tokens",
    "method=macs tasks=mme rho=3": "rho=3: must be a number from 0 to 2",
    "method=macs tasks=mme delta=-1": "delta=-1: must be a number of at least 0",
    "method=macs tasks=mme modality_threshold=0.5": "modality_threshold=0.5: must be a share above",
    "method=macs tasks=mme reroute=locl": "did you mean 'local'",
    "modality=image": "did you mean 'image_first'",
    "tasks=obqa tasks.obqa.images=1": f"tasks.obqa.images=1: {FLAG}",
    "tasks=obqa ~tasks.obqa.dataset": "field 'dataset' is missing",
    "rounding=cel": "did you mean 'ceil'",
    "decode=constrain": "did you mean 'constrained'",
    "renormalize=befor": "did you mean 'before'",
    "parallel=eep": "did you mean 'ep'",
    "parallel=ep": "needs one process per rank",
    "dtype=float31": "did you mean 'float32'",
    "dtype=int8": "dtype=int8: choose one of",
    # Text and paths.
    **{
        f"{key}={word}": f"{key}={said}: {TEXT}"
        for key in ("results_dir", "device")
        for word, said in (("null", "null"), ("42", "42"), ("true", "true"), ("'\"\"'", ""))
    },
    "results_dir=[a]": "results_dir=['a']",
    "'results_dir=\"a\nb\"'": TEXT,
    "results_dir=file": WRITE,
    "results_dir=file/below": WRITE,
    "results_dir=/proc/nothing": WRITE,
    f"results_dir={'a' * 300}": "File name too long",
    "device_map=42": "device_map=42",
    "device_map=true": "device_map=true",
    "data.root=42": "data.root=42",
    "data.root=true": "data.root=true",
    "data.root=[]": "data.root=[]",
    "'data.root=\"\"'": "data.root=",
    "data.root=nowhere": "data.root=nowhere: no such directory",
    "data.root=file": "data.root=file: no such directory",
    f"data.root={'a' * 300}": "File name too long",
    "data.root=truncated tasks=piqa": "no dataset 'baber/piqa'",
    "data.root=truncated tasks=obqa": "task=openbookqa: ",
    "data.root=columns tasks=obqa": "no column 'question_stem'",
    "data.root=unlisted tasks=obqa": "task=openbookqa: ",
    "data=null": "data=null",
    "data=42": "data=42",
    "model.pretrained=null": "model.pretrained=null",
    "model.pretrained=42": "model.pretrained=42",
    "'model.pretrained=\"\"'": "model.pretrained=",
    "model.pretrained=zoo:nope tasks=obqa": "model.pretrained=zoo:nope",
    "model.pretrained=tiny:nope tasks=obqa": "model.pretrained=tiny:nope: did you mean",
    "model.pretrained=/no/such tasks=obqa": "model.pretrained=/no/such: cannot be loaded",
    "model.pretrained=file tasks=obqa": "model.pretrained=file: cannot be loaded",
    "model.revision=null": "model.revision=null",
    "model.revision=1e5": "model.revision=100000.0",
    "model.tokenizer=42": "model.tokenizer=42",
    "model.tokenizer=/no/such tasks=obqa": "model.tokenizer=/no/such: cannot be loaded",
    "model.tokenizer=file tasks=obqa": "model.tokenizer=file: cannot be loaded",
    "model.title=null": "model.title=null",
    "model.note=42": "model.note=42",
    "tasks=obqa tasks.obqa.lm_eval=null": "tasks.obqa.lm_eval=null",
    "tasks=obqa tasks.obqa.lm_eval=openbook": "did you mean 'openbookqa'",
    "tasks=obqa tasks.obqa.dataset=null": "tasks.obqa.dataset=null",
    "tasks=obqa tasks.obqa.dataset=nowhere/at_all": "no dataset 'nowhere/at_all'",
    "tasks=obqa tasks.obqa.metric=null": "tasks.obqa.metric=null",
    "tasks=obqa tasks.obqa.metric=acc_nrm": "acc_nrm,none: did you mean 'acc_norm,none'?",
    "tasks=gsm8k tasks.gsm8k.filter=flexible": "did you mean 'exact_match,flexible-extract'?",
    "tasks=obqa tasks.obqa.metric=42": "tasks.obqa.metric=42",
    "tasks=obqa tasks.obqa.filter=null": "tasks.obqa.filter=null",
    "tasks=obqa tasks.obqa=null": "tasks.obqa=null",
    "tasks=obqa tasks.obqa=42": "tasks.obqa=42",
    "tasks=obqa ~tasks.obqa.metric": "field 'metric' is missing",
    "device=qpu tasks=obqa": "device=qpu: not usable here",
    "device=cuda:99 tasks=obqa": "device=cuda:99: not usable here",
    "ep_size=7 tasks=obqa": "ep_size=7: 32 experts cannot be spread evenly over 7 ranks",
    # Groups and keys.
    "tasks=[]": "tasks=",
    "tasks=null": "tasks=",
    "tasks=obqq": "did you mean 'obqa'",
    "tasks=[obqa,piqq]": "did you mean 'piqa'",
    "tasks=42": "tasks=42",
    "tasks=../model/olmoe": "tasks.name=olmoe",
    "model=nope": "model=nope: choose one of",
    "model=tiny_olmo": "model=tiny_olmo: did you mean 'tiny_olmoe'?",
    "model=null": "model",
    "model=[]": "model",
    "model=custom": "Missing mandatory value: model.name",
    "model=custom model.name=x": "model.pretrained",
    "profile=tinny": "did you mean 'tiny'",
    "profile=null": "profile=null: choose one of",
    "variant=papr": "did you mean 'paper'",
    "experiment=table8": "experiment=table8",
    "gama=1.0": "key=gama: did you mean 'gamma'",
    "model.nam=x": "model=nam: did you mean 'name'",
    "data.rot=x": "data=rot: did you mean 'root'",
    "tasks=obqa tasks.obqa.fewshots=3": "tasks=fewshots: did you mean 'fewshot'",
    "tasks=mts_dialog tasks.mts_dialog.metric=bertscore_f1": "metric=bertscore_f1: needs",
    "tasks=mts_dialog tasks.mts_dialog.layer=3": "tasks.mts_dialog.layer=3: is of an encoder; name",
    "tasks=mts_dialog tasks.mts_dialog.rescale=1": "tasks.mts_dialog.rescale=1: must be true or",
    "tasks=mts_dialog tasks.mts_dialog.encoder=/x tasks.mts_dialog.layer=2": "encoder=/x",
    "tasks=mts_dialog tasks.mts_dialog.lawer=3": "tasks=lawer: did you mean 'layer'",
    "~batch_size": "batch_size",
    "gamma": "gamma",
    "gamma=[1": "gamma",
    "=1": "=1",
    "--nope": "--nope",
    "--config-name nope": "nope",
    # Grids.
    "grid=null": "grid=null: must be keys with lists of values",
    "grid=42": "grid=42: must be keys",
    "grid=[1]": "grid=[1]",
    "parts=null": "parts=null: must be keys",
    "parts=42": "parts=42: must be keys",
    "parts.a=null": "parts.a=null: must be keys",
    "parts.a=[1]": "parts.a=[1]: must be keys",
    "grid.gamma=1": "grid.gamma=1: must be a list of values",
    "grid.gamma=[]": "grid.gamma=[]: must be a list of values",
    "grid.gamma={}": "grid.gamma={}: must be a list of values",
    "grid.gamma=[1.0,abc]": "gamma=abc: the capacity factor",
    "grid.gamma=[[1.0]]": "gamma=[1.0]: the capacity factor",
    "grid.gama=[1.0]": "key=gama: did you mean 'gamma'",
    "grid.grid=[1]": "key=grid",
    "grid.shard=[1/2]": "key=shard",
    "grid.model=[nope]": "model=nope: choose one of",
    "grid.model=[null]": "model=null: choose one of",
    "grid.model=[[zoo_olmoe]]": "model=['zoo_olmoe']: ",
    "grid.model=[../experiment/table1]": "choose one of",
    "grid.tasks=[nope]": "grid.tasks=nope",
    "grid.tasks=[null]": "grid.tasks=null",
    "grid.tasks=[[obqa]]": "grid.tasks=['obqa']",
    "grid.overwrite=[no]": f"overwrite=no: {FLAG}",
    "grid.limit=[true]": "limit=true",
    "grid.batch_size=[0]": "batch_size=0",
    "grid.results_dir=[null]": "results_dir=null",
    "grid.seed=[1.0]": "seed=1.0",
    "parts.a.gamma=[nan]": "gamma=nan",
    "parts.a.nope=[1]": "parts.a=nope",
    "experiment=table1 gamma=1": "gamma=1: gamma is set by the experiment's grid",
    "experiment=table1 grid.gama=[1]": "key=gama",
    "experiment=table1 grid.gamma=1": "grid.gamma=1: must be a list of values",
    "experiment=table1 grid.model=[x]": "model=x: choose one of",
    "grid.gamma=[1.0] gamma=2": "gamma=2: gamma is set by the experiment's grid",
    # Shares.
    **{f"shard={word}": f"shard={word}: must be i/n" for word in ("0/2", "3/2", "x", "1", "1/0")},
    "shard=true": "shard=true: must be i/n",
    # Forecasts.
    "plan=maybe": "plan=maybe: must be false, true or calibrate",
    "plan=1": "plan=1: must be false, true or calibrate",
    "-m plan=yes gamma=1.0,2.0": "plan=yes: must be false",
    "grid.plan=[true]": "key=plan",
    "shard=-1/2": "shard=-1/2: must be i/n",
    # Sweeps.
    "-m gamma=1.0,abc": "gamma=abc: the capacity factor",
    "-m overwrite=no,off": f"overwrite=no: {FLAG}",
    "-m model=tiny_olmoe,nope": "model=nope: choose one of",
    "-m tasks=obqa,obqq": "did you mean 'obqa'",
    "-m model.name=a,../evil": NAME,
    "-m method=score,scroe": "did you mean 'score'",
    "-m grid=null gamma=1.0,2.0": "grid=null",
    "-m results_dir=null,a": "results_dir=null",
    "-m limit=0,1": "limit=0",
    "-m shard=3/2 gamma=1.0,2.0": "shard=3/2",
    "-m gama=1,2": "did you mean 'gamma'",
    "-m batch_size=0,4": "batch_size=0",
}
REPORTS: Mapping[str, Mapping[str, str]] = {
    "tables": {
        "nosuch": "table=nosuch",
        "tabel2": "did you mean 'table2'",
        "": "required",
        "table2 --out file": f"--out=file: {WRITE}",
        "table2 --out file/below": WRITE,
        "table2 --out /proc/nothing": WRITE,
        "table2 --out ''": "--out=: must be a path",
        "table2 --out": "--out",
        "all --out file": WRITE,
        "table2 --published v2 --out file": WRITE,
        "table2 --published v3": "--published=v3",
        "nosuch --published v1": "table=nosuch",
        "table2 --nope": "--nope",
        "table2 experiment=table1": "experiment=table1",
        "table2 ++experiment=table1": "experiment=table1",
        "table5 experiment=table1": "experiment=table1",
        "table2 profile=tinny": "did you mean 'tiny'",
        "table2 profile.name=../evil": "profile.name=../evil",
        "table5 profile.name=../evil": "profile.name=../evil",
        "table10 profile.name=../evil": "profile.name=../evil",
        "table2 limit=0": "limit=0",
        "table2 limit=true": "limit=true",
        "table2 grid=null": "grid=null",
        "table1 gamma=1": "gamma=1: gamma is set by the experiment's grid",
        "table2 out=mine": "out=mine: is an option; write --out=mine",
        "table2 bench=mine": "bench=mine: is an option; write --bench=mine",
        "all out=mine": "out=mine: is an option; write --out=mine",
        "table2 results_dir=/nonexistent": "results_dir=/nonexistent: no such directory",
        "all results_dir=nowhere": "results_dir=nowhere: no such directory",
        "table2 results_dir=file": "results_dir=file: no such directory",
        "table2 model=custom": "Missing mandatory value: model.name",
        "table2 model=custom model.name=mine": "Missing mandatory value: model.pretrained",
        "table2 model=custom model.name=a model.pretrained=b model.profile=../c": "model.profile=",
        "table2 model=nope": "model=nope: choose one of",
        "table2 model.name=mine": "model.name=mine: model is set by the experiment's grid",
        "table2 tasks=[obqa,[piqa]]": "tasks=[obqa,[piqa]]: ",
        "table2 @x=1": "@x=1: ",
        f"table2 limit={'9' * 23}": "limit=999",
        "table2 gama=1": "did you mean 'gamma'",
        "table2 results_dir=null": "results_dir=null",
        "table2 data.root=42": "data.root=42",
        "table2 model.name=../x": "model.name=../x",
        "table2 tasks=[]": "tasks=",
    },
    "figures": {
        "fig99": "fig99",
        "": "required",
        "fig7 --out file": f"--out=file: {WRITE}",
        "all --out file": WRITE,
        "fig7 --out /proc/nothing": WRITE,
        "fig7 --formats bmp": "--formats=bmp",
        "fig7 --nope": "--nope",
        "fig7 experiment=table1": "experiment=table1",
        "fig7 profile=tinny": "did you mean 'tiny'",
        "fig7 profile.name=../evil": "profile.name=../evil",
        "fig7 limit=0": "limit=0",
        "fig7 limit=true": "limit=true",
        "fig7 grid=null": "grid=null",
        "fig7 parts=null": "parts=null",
        "fig7 results_dir=null": "results_dir=null",
        "fig7": "fig7",
    },
    "claims": {
        "--out file": f"--out=file: {WRITE}",
        "--out /proc/nothing": WRITE,
        "profile=tinny": "did you mean 'tiny'",
        "profile=../evil": "profile=../evil",
        "profile=": "expected KEY=VALUE",
        "gamma=1.0": "key=gamma",
        "results_dir=nowhere": "no such directory",
        "results_dir=file": "no such directory",
        "nope": "expected KEY=VALUE",
        "--nope": "--nope",
    },
    "replication": {
        "": "no finished evaluation of experiment=replicate",
        "profile=tinny": "did you mean 'tiny'",
        "experiment=table1": "experiment=table1",
        "limit=0": "limit=0",
        "grid=null": "grid=null",
        "results_dir=null": "results_dir=null",
        "gamma=1": "gamma=1",
        "--out ''": "must be a path",
        "--nope": "--nope",
    },
    "site": {
        "--out file": f"--out=file: {WRITE}",
        "--out /proc/nothing": WRITE,
        "profile=tinny": "did you mean 'tiny'",
        "profile.name=../evil": "profile.name=../evil",
        "experiment=table1": "experiment=table1",
        "gama=1": "did you mean 'gamma'",
        "--nope": "--nope",
    },
    "adaptive": {
        "experiment=table2": "leave it out",
        "profile=tiny results_dir=nowhere": "no finished evaluation with gamma=adaptive",
        "gamma=abc": "gamma",
    },
    "advise": {
        "": "required",
        "example": "budget: nothing is asked",
        "example --at-least-speedup 0": "--at-least-speedup=0",
        "example --at-most-points -1": "--at-most-points=-1",
        "example --at-most-points 1": "ranks: is not known",
        "example --at-most-points 1 --ranks 0": "--ranks=0",
        "example --at-most-points 1 --ranks 1": "ranks=1: one rank waits for no other",
        "example --at-most-points 1 --ranks 5": "ranks=5: 32 experts",
        "example --at-most-points 1 --ranks 8 --experts-per-rank 3": "give at least 4",
        "example --at-most-points 1 --ranks 8 --link-share 2": "--link-share=2",
        "example --at-most-points 1 --ranks 8 --expert-bytes 0": "--expert-bytes=0",
        "example --at-most-points 1 --ranks 8 --gammas inf": "gammas=inf",
        "example --at-most-points 1 --ranks 8 --gammas 0": "gammas=0",
        "example --at-most-points 1 --ranks 8 --step-tokens 0": "--step-tokens=0",
        "example --at-most-points 1 --ranks 8 --results nowhere": "no whole record of model",
        "example --at-most-points 1 --ranks 8 --out file": WRITE,
        "example --at-most-points 1 --ranks 8 --only decode": "the trace has no such step",
        "traces/recorded --at-most-points 1 --ranks 8": "give one of them, such as",
        "nowhere.npz --at-most-points 1": "no such file",
        "record.json --at-most-points 1": "not the name of a trace",
        ". --at-most-points 1": "manifest.json",
        "example --nope": "--nope",
    },
    "loads": {
        "": "required",
        "record.json": "out: is required for a record",
        "nowhere.json out.png": "not a whole record",
        "file out.png": "not the name of a trace",
        "nowhere.npz": "no such file",
        ". out.png": "manifest.json",
        "traces/cut.npz": "not a whole trace of this suite",
        "traces/other.npz": "about is not a file in the archive",
        "traces/later.npz": "field: the file is of another version of this suite",
        "traces/cut.parquet": "not a whole trace of this suite",
        "traces/other.parquet": "layers is missing",
        "traces/cut.pt": "no whole file of torch.save",
        "traces/text.pt": "it begins with other bytes",
        "traces/other.pt": "has neither logical_count nor records",
        "traces/flat.pt": "logical_count: [8]; must be [steps, layers, experts]",
        "traces/empty.jsonl --experts 8": "is empty; give a JSON response",
        "traces/empty.jsonl": "add --experts E",
        "traces/cut.jsonl --experts 8": "line 1: not a whole JSON object",
        "traces/chat.jsonl --experts 8": "--enable-return-routed-experts",
        "traces/words.jsonl --experts 8": "line 1: no response of vLLM with choices",
        "traces/ragged.jsonl --experts 8": "tokens differ in their layers or in their top-k",
        "traces/number.jsonl --experts 8": "int64 []; must be integers",
        "traces/recorded": "a directory with 2 files of a server; give one of them, such as",
        "traces/recorded/0.pt traces/recorded/1.pt": "give one trace at a time",
        "traces/recorded/0.pt --experts 16": "experts=16: traces/recorded/0.pt has 8",
        "traces/recorded/0.pt --only decode": "does not say which steps are prompts",
        "traces/recorded/0.pt --only promts": "--only",
        "traces/recorded/0.pt --step-tokens 32": "step tokens: the trace has counts of steps",
        "traces/workload": "no trace of Megatron-LM (tensors is missing)",
        "trace.npz out.bmp": "bmp",
        "trace.npz --json file/out.json": WRITE,
        "trace.npz --ranks 0": "--ranks=0",
        "trace.npz --gammas -1": "--gammas",
        "trace.npz --experts x": "--experts=x",
        "trace.npz --step-tokens 0": "--step-tokens=0",
        "record.json out.png": "no record of this suite",
        "record.json out.bmp": "bmp",
        "record.json file/out.png": WRITE,
        "record.json out.png --layer abc": "--layer=abc",
        "record.json out.png --layer -1": "--layer=-1",
        "record.json out.png --layer": "--layer",
    },
    "tiny": {
        "": "required",
        "nope": "nope",
        "train": "required",
        "train olmo": "did you mean 'olmoe'",
        "train ../evil": "name=../evil",
        "card ../evil": "name=../evil",
        **{
            f"train olmoe --steps {word}": f"--steps={word}: {WHOLE}"
            for word in ("0", "-1", "nan", "1.5", "abc", "true")
        },
        **{
            f"train olmoe --threads {word}": f"--threads={word}" for word in ("0", "-1", "x", "1e9")
        },
        **{f"train olmoe --seed {word}": f"--seed={word}" for word in ("-1", "1.5", "4294967296")},
        "train olmoe --out file": f"--out=file: {WRITE}",
        "train olmoe --out file/below": WRITE,
        "train olmoe --out /proc/nothing": WRITE,
        "train olmoe --out new --work file": f"--work=file: {WRITE}",
        "card olmoe --out file": WRITE,
        "card olmoe --out nowhere": "nowhere",
        "origins --names olmoe": "not upcycled",
        "origins --names nope": "name=nope",
        "origins --steps 0": "--steps=0",
        "origins --seeds -1": "--seeds=-1",
        "origins --seeds": "--seeds",
        "origins --threads 0": "--threads=0",
        "origins --out file/below": WRITE,
        "origins --out record.json --steps 1": "record.json",
        "origins --out new.json --work file": WRITE,
    },
    "bench": {
        "": "required",
        "nope": "nope",
        **{
            f"forward --{option} {word}": f"--{option}={word}: must be"
            for option in ("layers", "batch", "prompt", "rounds")
            for word in ("0", "-1", "x")
        },
        **{f"forward --peak {word}": "peak=" for word in ("nan", "inf", "-1", "0", "100", "x")},
        "forward --warmup -1": "--warmup=-1",
        "forward --batch 7": "batch=7: must be a multiple",
        "forward --shape olmo": "did you mean 'olmoe'",
        "forward --device qpu": "device=qpu",
        "forward --dtype float31": "did you mean 'float32'",
        "forward --out file": f"--out=file: {WRITE}",
        "decision --tokens 0": "--tokens=0",
        "decision --ranks 0": "--ranks=0",
        "decision --ranks 7 --tokens 70": "7 ranks",
        "decision --tokens 10": "must be a multiple of ranks",
        "decision --rounds 0": "--rounds=0",
        "decision --layer-rounds 0": "--layer-rounds=0",
        "decision --layer-tokens 0": "--layer-tokens=0",
        "decision --shapes nope": "shapes=nope",
        "decision --device qpu": "device=qpu",
        "decision --out file": WRITE,
        "suite --limit 0": "--limit=0",
        "suite --rounds -1": "--rounds=-1",
        "suite --model nope": "--model=nope",
        "suite --tasks obqq": "did you mean 'obqa'",
        "suite --out file": WRITE,
        "cells --cells 1": "--cells=1: must be at least 40",
        "cells --limit 0": "--limit=0",
        "cells --documents 0 1": "--documents=0",
        "cells --documents 4": "--documents=4: must be at least two sizes",
        "cells --repeats 1": "--repeats=1: must be at least 2",
        "cells --model nope": "--model=nope",
        "cells --task obqq": "did you mean 'obqa'",
        "cells --out file": WRITE,
        **{f"ep --latency {word}": "--latency=" for word in ("-1", "nan", "inf", "x")},
        **{f"ep --bandwidth {word}": "--bandwidth=" for word in ("-1", "0", "nan", "inf")},
        **{f"ep --balance {word}": "--balance=" for word in ("-1", "0", "nan", "inf")},
        **{f"ep --peaks {word}": "peak" for word in ("nan", "-1", "0.5", "100")},
        **{f"ep --gammas {word}": "gammas=" for word in ("nan", "-1", "x")},
        "ep --ranks 0": "--ranks=0",
        "ep --ranks 7": "7 ranks",
        "ep --tokens 0": "--tokens=0",
        "ep --repeats 0": "--repeats=0",
        "ep --warmup -1": "--warmup=-1",
        "ep --layers -1": "--layers=-1",
        "ep --layer -1": "--layer=-1",
        "ep --prompt 0": "--prompt=0",
        "ep --scale 0": "--scale=0",
        "ep --scale 7": "scale=7",
        "ep --batch-divisor 0": "--batch-divisor=0",
        "ep --study nope": "study=nope",
        "ep --machine h21": "did you mean 'h20'",
        "ep --machine h20 --latency 1e-6": "a link is either stated",
        "ep --shape olmo": "did you mean 'olmoe'",
        "ep --methods scroe": "did you mean 'score'",
        "ep --candidates globl --methods expanded_drop": "did you mean 'global'",
        "ep --granularities experts": "did you mean 'expert'",
        "ep --trace nowhere": "nowhere",
        "ep --trace record.json": "record.json",
        "ep --layers 1 --tokens 10 --prompt 7": "prompt=7",
        "ep --device qpu": "device=qpu",
        "ep --dtype float31": "did you mean 'float32'",
        "ep --out file": WRITE,
    },
}
_RUN = "run --model capmoe --tasks piqa --model_args"
LM_EVAL: Mapping[str, str] = {
    "run": "",
    f"{_RUN} pretrained=x,method=scroe": "did you mean 'score'",
    f"{_RUN} pretrained=x,method=score": "gamma: method 'score' needs",
    f"{_RUN} pretrained=x,method=score,gamma=abc": "gamma=abc",
    f"{_RUN} pretrained=x,method=score,gamma=-1": "gamma=-1",
    f"{_RUN} pretrained=x,method=score,gamma=True": "gamma=true",
    f"{_RUN} pretrained=x,method=score,gamma=1,ep_size=0": "ep_size=0",
    f"{_RUN} pretrained=x,method=score,gamma=1,ep_size=1.5": "ep_size=1.5",
    f"{_RUN} pretrained=x,method=score,gamma=1,max_k=no": f"max_k=no: {FLAG}",
    f"{_RUN} pretrained=x,method=score,gamma=1,scope=bach": "did you mean 'batch'",
    f"{_RUN} pretrained=x,method=random,gamma=1,seed=-1": "seed=-1",
    f"{_RUN} pretrained=/no/such": "/no/such",
    f"{_RUN} pretrained=file": "file",
    f"{_RUN} method=baseline": "pretrained",
    f"{_RUN} pretrained=/no/such --batch_size -4": "batch_size=-4",
    f"{_RUN} pretrained=/no/such --batch_size abc": "batch_size=abc",
    f"{_RUN} pretrained=/no/such --num_fewshot abc": "abc",
    f"{_RUN} pretrained=/no/such --limit abc": "abc",
    f"{_RUN} pretrained=/no/such --nope": "--nope",
    f"{_RUN} pretrained=/no/such --seed abc": "abc",
    f"{_RUN} pretrained=/no/such --config nowhere.yaml": "nowhere.yaml",
    "run --model capmoe --tasks nosuch --model_args pretrained=/no/such": "nosuch",
    "run --model capmo --tasks piqa": "capmo",
}


def write_traces(place: Path) -> None:
    """Write traces that are cut off, of another kind or of a server, below a directory."""
    for name in ("recorded", "workload"):
        (place / name).mkdir(parents=True)
    np.savez(place / "other.npz", a=np.arange(3))
    about = {"schema": 1, "n_experts": 4, "layers": ["0"], "field": 1}
    np.savez(place / "later.npz", about=np.array(json.dumps(about)), load_SLE=np.ones((1, 1, 4)))
    pd.DataFrame({"a": [1]}).to_parquet(place / "other.parquet")
    for number in range(2):
        counted = {"logical_count": torch.ones(2, 3, 8, dtype=torch.int64)}
        torch.save(counted, place / f"recorded/{number}.pt")
    torch.save({"logical_count": torch.ones(8)}, place / "flat.pt")
    torch.save({"weight": torch.ones(8)}, place / "other.pt")
    for kind in ("npz", "parquet", "pt"):
        path = place / f"other.{kind}"
        (place / f"cut.{kind}").write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    responses = {
        "empty": "",
        "cut": '{"choices": [{"routed_experts": [[[0, 1',
        "chat": '{"choices": [{"message": {"content": "a"}}]}',
        "words": '{"choices": ["a"]}',
        "ragged": '{"choices": [{"routed_experts": [[[0, 1], [1]]]}]}',
        "number": '{"choices": [{"routed_experts": 5}]}',
    }
    for name, text in responses.items():
        (place / f"{name}.jsonl").write_text(text)
    (place / "text.pt").write_text("a")
    (place / "workload/manifest.json").write_text('{"schema_version": 1}')


def rows() -> Iterator[Row]:
    """Yield every row."""
    for command, table in {"main": MAIN, **REPORTS, "lm_eval": LM_EVAL}.items():
        for words, said in table.items():
            yield Row(command, words, said)
