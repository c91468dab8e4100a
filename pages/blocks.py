"""Every block of README and docs by its name."""

from collections.abc import Callable
from functools import partial
from typing import Final

from pages import benchmarks, effects, embedded, fresh, glance, protocol, real
from pages.commands import first_result, knob_table, printed

BLOCKS: Final[dict[str, Callable[[], str]]] = {
    "glance": glance.caption,
    "headline": glance.headline,
    "first-result": partial(
        first_result, "capmoe-eval run method=score gamma=1.0 'tasks=[obqa,mmlu]'"
    ),
    "sweep": partial(printed, "capmoe-eval sweep method=order,score gamma=1.0,2.0 tasks=obqa"),
    "caption": effects.caption,
    "same-tasks": effects.same_tasks,
    "rests-on": effects.rests_on,
    "models": effects.models,
    "adaptive": effects.adaptive,
    "placed-drops": effects.placed_drops,
    "knobs": knob_table,
    "advice": partial(
        printed, "capmoe-eval advise example --ranks 8 --at-least-speedup 1.2", paragraphs=slice(3)
    ),
    "advice-with-results": partial(
        printed,
        "capmoe-eval advise example --ranks 8 --at-least-speedup 1.6 --at-most-points 1 "
        "--results results/zoo",
        paragraphs=slice(1, 2),
    ),
    "loads": partial(printed, "capmoe-eval loads example --ranks 8 --gammas 1 1.5 2"),
    "balancing": benchmarks.balancing,
    "adaptive-verdict": effects.adaptive_verdict,
    "server-speed": benchmarks.server_speed,
    "real-speed": benchmarks.real_speed,
    "server-steps": effects.server_steps,
    "decode-steps": effects.server_decode,
    "emulation": benchmarks.emulation,
    "generation": embedded.generation,
    "images": embedded.images,
    "in-context": embedded.in_context,
    "in-context-choices": embedded.in_context_choices,
    "size": embedded.sizes,
    "size-changes": embedded.size_changes,
    "macs": embedded.macs,
    "protocol-runs": protocol.runs,
    "protocol-revisions": protocol.revisions,
    "protocol-real": partial(protocol.primary_table, "real"),
    "protocol-fresh": partial(protocol.primary_table, "fresh"),
    "protocol-rules": partial(
        protocol.listed, "rules", rule="`{id}`", exploratory="{was}", here="{is}"
    ),
    "protocol-tasks": partial(
        protocol.listed,
        "tasks",
        task="`{name}`",
        documents="{documents:,}",
        of="{of}",
        which="{rule}",
    ),
    "protocol-settings": protocol.settings,
    "protocol-outcomes": protocol.outcomes,
    "protocol-deviations": partial(
        protocol.listed, "deviations", date="{date}", what="{what}", why="{why}"
    ),
    "fresh-summary": fresh.summary,
    "fresh-models": fresh.models,
    "fresh-verdicts": fresh.verdicts,
    "fresh-readings": fresh.readings,
    "fresh-claims": fresh.claims,
    "real-caption": real.caption,
    "real-dev": real.dev_scores,
    "real-verdicts": real.verdicts,
    "real-text": real.text_scores,
    "real-tasks": real.task_scores,
}

PICTURES: Final = {glance.PICTURE: glance.picture, real.PICTURE: real.picture}
"""Every picture of README and docs that is drawn from records, and what draws it."""
