"""Real engines: phases, chunks, the prefix cache, preempted and aborted requests, stock bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from capmoe_eval.errors import EnforcementError
from capmoe_eval.routing.method import Method
from capmoe_eval.routing.registry import create_method
from capmoe_eval.wrapper.observers import Observer
from capmoe_eval.zoo import WEIGHTS

from capmoe_serve.server.step import StepPlan
from server.engines import NEEDS_VLLM, Engine, engine, make, prompt_logprobs, prompts

pytestmark = [NEEDS_VLLM, pytest.mark.slow]


class Plans(Observer):
    """Keeps the plans of every step."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def begin(self, plan: Any) -> None:
        self.plans.append(plan)

    def rows(self, *, decode: bool | None = None, under: bool | None = None) -> int:
        """Return the number of rows of a phase, or of those under the method."""
        return sum(
            int((plan.decode_T == decode).sum()) if decode is not None else len(plan.rows_T)
            for plan in self.plans
            if under in (None, plan.constrained)
        )


def watch(started: Engine, method: Method) -> Plans:
    """Put an engine under a method; return the plans of its following steps."""
    started.put_under(method)
    plans = Plans()
    started.runner.capmoe.meter.observe(plans)
    return plans


def answers(outputs: Sequence[Any]) -> tuple[list[float], list[list[int]]]:
    """Return the log-probabilities of prompts, and the generated tokens."""
    return prompt_logprobs(outputs), [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("olmoe")
    make("olmoe").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def started(tiny: Path) -> Iterator[Engine]:
    with engine(tiny, create_method("baseline")) as of:
        yield of


# Phases.


@pytest.mark.parametrize("decode", ["unconstrained", "constrained", "only"])
def test_every_token_is_under_the_method_in_the_phases_that_it_concerns(
    started: Engine, decode: str
) -> None:
    plans = watch(started, create_method("score", 0.5, decode=decode))
    texts, tokens = prompts(8, 12, 5), 6
    started.generate(texts, tokens)
    n_prompt, n_decoded = 25, 3 * (tokens - 1)  # the last token is not computed
    assert plans.rows(decode=False) == n_prompt
    assert plans.rows(decode=True) == n_decoded
    expected = {"unconstrained": n_prompt, "only": n_decoded, "constrained": n_prompt + n_decoded}
    summary = started.report()["summary"]
    assert plans.rows(under=True) == summary["tokens"] == expected[decode]
    assert summary["dropped"] > 0
    assert [
        proof for proof in started.report()["proofs"].values() if proof["passed"] is False
    ] == []


def test_unconstrained_decoding_is_the_stock_engine_s(started: Engine) -> None:
    # After one prompt in a step of its own without a drop, everything is decoded.
    text = prompts(1)
    started.put_under(create_method("baseline"))
    stock = answers(started.generate(text, 20))
    plans = watch(started, create_method("score", 0.5, decode="only"))
    assert answers(started.generate(text, 20)) == stock  # one row takes no more than C = 1
    plans = watch(started, create_method("score", 0.0, decode="unconstrained"))
    dropped = started.generate(prompts(1, 1), 20)
    assert plans.rows(under=False) == 2 * 19
    assert len(answers(dropped)[1][0]) == 20


# The composition of steps.


def test_steps_mix_prompts_and_decoded_tokens(started: Engine) -> None:
    plans = watch(started, create_method("score", 1.0))
    llm = started.llm.llm_engine
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=6, detokenize=False, ignore_eos=True, temperature=0.0)
    first, second = prompts(6, 9)
    llm.add_request("first", {"prompt_token_ids": first}, parameters)
    llm.step()
    llm.add_request("second", {"prompt_token_ids": second}, parameters)
    while llm.has_unfinished_requests():
        llm.step()
    mixed = [plan for plan in plans.plans if len(set(plan.step.decode_N.tolist())) == 2]
    assert [plan.constrained for plan in mixed] == [True, False]  # the two plans of one step
    assert [len(plan.rows_T) for plan in mixed] == [9, 1]
    assert plans.rows(under=True) == 15
    assert started.report()["summary"]["tokens"] == 15


def test_an_aborted_request_leaves_the_counters_whole(started: Engine) -> None:
    plans = watch(started, create_method("score", 1.0, decode="constrained"))
    llm = started.llm.llm_engine
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=8, detokenize=False, ignore_eos=True, temperature=0.0)
    for name, text in zip("abc", prompts(6, 9, 4), strict=True):
        llm.add_request(name, {"prompt_token_ids": text}, parameters)
    llm.step()
    llm.abort_request(["b"])
    while llm.has_unfinished_requests():
        llm.step()
    report = started.report()
    assert report["summary"]["tokens"] == plans.rows() >= 19 + 2 * 7
    for layer in report["layers"]:
        kept, routed = sum(layer["load_after"]), sum(layer["load_before"])
        assert kept + layer["dropped"] == routed == layer["assignments"]


# Engines of their own, which end what the one before needs.


def test_chunks_of_a_prompt_are_prompts(tiny: Path) -> None:
    with engine(
        tiny, create_method("baseline"), max_num_batched_tokens=16, max_num_seqs=8
    ) as chunked:
        stock = chunked.logprobs(prompts(33, 17))
        plans = watch(chunked, create_method("score", 0.5))
        outputs = chunked.generate(prompts(33, 17), 3)
        assert plans.rows(decode=False) == plans.rows(under=True) == 50
        assert plans.rows(decode=True) == 4
        steps = [plan.step for plan in plans.plans if plan.constrained]
        assert len(steps) >= 4
        assert max(step.n_rows for step in steps) <= 16
        # A prompt of 33 tokens ends in a chunk of one row, behind others.
        single = [of for step in steps for of in zip(step.scheduled, step.computed, strict=True)]
        assert any(scheduled == 1 and computed > 0 for scheduled, computed in single)
        assert prompt_logprobs(outputs) != stock
        capacities = [plan.groups.n_tokens for plan in plans.plans if plan.constrained]
        assert sum(capacities) == 50


def test_tokens_of_the_prefix_cache_do_not_count(tiny: Path) -> None:
    with engine(
        tiny, create_method("score", 1.0), enable_prefix_caching=True, block_size=32
    ) as cached:
        (text,) = prompts(40)
        asked = {"prompt_logprobs": None}  # with them the whole prompt is computed
        cached.generate([text], **asked)
        plans = Plans()
        cached.runner.capmoe.meter.observe(plans)
        before = cached.report()["summary"]["tokens"]
        cached.generate([text + prompts(5, seed=1)[0]], **asked)
        assert before == 40
        step = plans.plans[0].step
        assert step.computed[0] == 32
        assert cached.report()["summary"]["tokens"] - before == 45 - step.computed[0]


def test_a_preempted_request_computes_its_tokens_again(tiny: Path) -> None:
    # Blocks of 32 tokens for 96 do not hold two requests of 64.
    with engine(
        tiny,
        create_method("score", 1.0, decode="constrained"),
        num_gpu_blocks_override=4,
        block_size=32,
        max_model_len=96,
    ) as narrow:
        plans = Plans()
        narrow.runner.capmoe.meter.observe(plans)
        outputs = narrow.generate(prompts(20, 20), 44, prompt_logprobs=None)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [44, 44]
        again = plans.rows() - 2 * (20 + 43)
        assert again > 0  # what the preempted request had computed
        # Its generated tokens are computed again in one step, and are of the decode phase.
        assert plans.rows(decode=False) - 40 == 20
        assert plans.rows(decode=True) - 2 * 43 == again - 20
        summary = narrow.report()["summary"]
        assert summary["tokens"] == plans.rows(under=True) == plans.rows()


# The stock engine's bits.


def test_a_bound_that_is_never_reached_changes_no_bit(tiny: Path) -> None:
    texts = prompts(16, 16, 24, 8)
    with engine(tiny, None) as stock:
        assert not hasattr(stock.runner, "capmoe")
        expected = answers(stock.generate(texts, 8))
    for method in (create_method("baseline"), create_method("score", 1000.0)):
        with engine(tiny, method) as under:
            assert answers(under.generate(texts, 8)) == expected
            report = under.report()
            assert report["summary"]["tokens"] >= 64
            assert report["summary"]["dropped"] == 0
    with engine(tiny, create_method("score", 0.5)) as under:
        assert answers(under.generate(texts, 8)) != expected


# Compiled.


def test_a_compiled_engine_decides_in_every_step(tiny: Path) -> None:
    texts, method = prompts(16, 16, 24, 8), create_method("score", 0.5, decode="constrained")
    with engine(tiny, method) as eager:
        expected = eager.generate(texts, 5)
        counted = eager.report()
    with engine(tiny, method, enforce_eager=False) as compiled:
        served = compiled.generate(texts, 5)
        report = compiled.report()
        assert report["summary"]["tokens"] == counted["summary"]["tokens"] == 64 + 4 * 4
        assert report["summary"]["dropped"] == counted["summary"]["dropped"]
        for layer, of_eager in zip(report["layers"], counted["layers"], strict=True):
            assert layer["load_after"] == of_eager["load_after"]
        torch.testing.assert_close(
            torch.tensor(prompt_logprobs(served)),
            torch.tensor(prompt_logprobs(expected)),
            rtol=0,
            atol=1e-5,
        )
        assert answers(served)[1] == answers(expected)[1]


# Precision, and what breaks.


def test_bfloat16_keeps_the_invariants() -> None:
    texts = prompts(16, 16, 24, 8, vocabulary=900)
    with engine(WEIGHTS / "olmoe", create_method("baseline"), dtype="bfloat16") as started:
        stock = started.logprobs(texts)
        started.put_under(create_method("score", 0.5, decode="constrained"))
        outputs = started.generate(texts, 4)
        report = started.report()
        assert report["summary"]["dropped"] > 0
        assert report["proofs"]["kernel_agrees"]["passed"]
        assert prompt_logprobs(outputs) != stock
        assert [of for of in report["proofs"].values() if of["passed"] is False] == []


def test_an_engine_whose_routers_are_replaced_stops(tiny: Path) -> None:
    with engine(tiny, create_method("score", 0.5)) as broken:
        broken.logprobs(prompts(16))
        for layer in broken.runner.capmoe.meter.layers:
            router: Any = layer.router
            router._select_experts = type(router)._select_experts.__get__(router)
        with pytest.raises(EnforcementError, match="no MoE layer ran under the method"):
            broken.logprobs(prompts(16))


def test_an_engine_whose_experts_ignore_the_decision_stops(tiny: Path) -> None:
    with engine(tiny, create_method("score", 0.5)) as broken:
        broken.logprobs(prompts(16))
        experts: Any = broken.runner.capmoe.meter.layers[0].experts
        under_capacity = experts.apply

        def ignores(**call: Any) -> Any:
            return under_capacity(**call | {"topk_weights": call["topk_weights"].clamp_min(0.1)})

        experts.apply = ignores
        with pytest.raises(EnforcementError, match="capacity not enforced"):
            broken.logprobs(prompts(16))


def test_two_ranks_of_tensor_parallelism_decide_alike(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, method = prompts(16, 16, 24, 8), create_method("score", 0.5)
    with engine(tiny, method) as alone:
        expected = alone.logprobs(texts)
        (counted,) = alone.llm.collective_rpc("capmoe_report")
    # The plugin of the ranks reads the environment; in this process the tests take its place.
    monkeypatch.setattr("vllm.plugins.plugins_loaded", True)
    monkeypatch.setenv("CAPMOE_METHOD", "score")
    monkeypatch.setenv("CAPMOE_GAMMA", "0.5")
    with engine(tiny, method, tensor_parallel_size=2) as both:
        served = both.logprobs(texts)
        for report in both.llm.collective_rpc("capmoe_report"):
            assert report["summary"]["dropped"] == counted["summary"]["dropped"]
            for layer, of_one in zip(report["layers"], counted["layers"], strict=True):
                assert layer["load_after"] == of_one["load_after"]
    torch.testing.assert_close(torch.tensor(served), torch.tensor(expected), rtol=0, atol=1e-5)
