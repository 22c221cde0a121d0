"""Training steps: two chunks a rank with experts over both ranks, and pipelines of both ranks by several schedules."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from measuring.steps import in_turn, rates

import torchweave as tw
from torchweave.engine.pair import engine
from torchweave.measure.hidden import is_simulated
from torchweave.schedule.passes import only_compute
from two_gpu.setup import (
    Setup,
    alone,
    are_equal,
    before_each,
    group_with,
    hidden_shares,
    lone_groups_are_slow,
    peaks_mib,
    put_over,
    stages,
    strategies,
    ways_of,
)

# how many SMs NCCL's kernels may hold: as many as it likes, and few, which makes its link slower and its kernels longer
CTAS = (None, 4)
# (schedule, strategy): those without pairs have nothing to weave
WAYS = (
    ("1f1b", "serial"),
    ("zbv", "serial"),
    ("dualpipev", "serial"),
    ("dualpipev", "turns"),
    ("dualpipe", "serial"),
    ("dualpipe", "turns"),
)


def experts(setup: Setup) -> None:
    """DualPipeV on one rank a pipeline, experts over both: every steady-state pair hides all-to-alls of NCCL's."""
    own = alone()
    model = setup.model(dist.group.WORLD)
    parameters = list(model.parameters())
    for ctas in CTAS:
        put_over(model, group_with(ctas, setup.device))
        chunks = stages(model, "dualpipev", own)
        pipelines = {name: tw.pipeline.build(chunks, "dualpipev", own, strategy=name) for name in strategies()}
        for count in setup.sizes.counts:
            if setup.is_over():
                return
            ways = ways_of(pipelines, setup.rows(count, 1 + dist.get_rank()), count)
            equal = are_equal(ways, parameters, setup.device) if count == setup.sizes.counts[0] else {}
            times = in_turn(ways, setup.sizes.rounds, setup.device, before=before_each(parameters))
            row = {
                "schedule": "dualpipev",
                "ranks": "1 of a pipeline, 2 that share experts",
                "nccl_ctas": ctas,
                "microbatches": count,
                "pairs": num_pairs(pipelines["turns"], count),
                **equal,
                # each rank has text of its own
                **rates(times, 2 * count * setup.sizes.tokens),
                "step_mib": peaks_mib(ways, parameters, setup.device),
                "device": hidden_shares(ways, setup.device, before_each(parameters)),
            }
            setup.report.add(row, told(row))
        engine().close()
    setup.report.set(best=best(setup, "nccl_ctas"))


def pipelines(setup: Setup) -> None:
    """Pipelines of both ranks: a stage's experts are on its rank, over a simulated link in the second half."""
    own = alone()
    model = setup.model(own)
    parameters = list(model.parameters())
    for simulated in (False, True):
        lone_groups_are_slow(simulated)
        built = {}
        for schedule, strategy in WAYS:
            chunks = stages(model, schedule, dist.group.WORLD)
            built[f"{schedule} {strategy}"] = tw.pipeline.build(chunks, schedule, strategy=strategy)
        with setup.link(simulated) if simulated else contextlib.nullcontext():
            for count in setup.sizes.counts:
                if setup.is_over():
                    return
                ways = ways_of(built, setup.rows(count, 1), count)
                pairs = {name: num_pairs(pipeline, count) for name, pipeline in built.items()}
                woven = {name: way for name, way in ways.items() if name.startswith("dualpipev")}
                equal = are_equal(woven, parameters, setup.device) if count == setup.sizes.counts[0] else {}
                losses: dict[str, float] = {}
                times = in_turn(
                    ways,
                    setup.sizes.rounds,
                    setup.device,
                    before=before_each(parameters),
                    after=lambda name, loss, losses=losses: losses.update({name: loss.item()}),
                )
                row = {
                    "ranks": "2 of a pipeline",
                    "link_ms": setup.sizes.link_ms if simulated else None,
                    "microbatches": count,
                    "pairs": pairs,
                    **equal,
                    "losses": losses,
                    **rates(times, count * setup.sizes.tokens, "1f1b serial"),
                    "woven_over_serial": {
                        schedule: statistics.median(
                            s / w for s, w in zip(times[f"{schedule} serial"], times[f"{schedule} turns"], strict=True)
                        )
                        for schedule in ("dualpipev", "dualpipe")
                    },
                    "step_mib": peaks_mib(ways, parameters, setup.device),
                    "device": hidden_shares(ways, setup.device, before_each(parameters), is_simulated)
                    if simulated
                    else None,
                }
                setup.report.add(row, told(row))
        engine().close()
    setup.report.set(best=best(setup, "link_ms"))


def num_pairs(pipeline: tw.pipeline.Pipeline, count: int) -> int:
    """Return how many pairs this rank runs in a step."""
    plan = only_compute(pipeline.plan(count))
    rank = dist.get_rank() % plan.num_ranks
    return sum(bool(action.parts) for action in plan.ranks[rank])


def best(setup: Setup, key: str) -> list[dict[str, Any]]:
    """Return for each link the best of the microbatch counts of each way."""
    found: dict[Any, dict[str, Any]] = {}
    for row in setup.report.rows:
        into = found.setdefault(row[key], {key: row[key], "tokens_per_second": {}, "microbatches": {}})
        for name, rate in row["tokens_per_second"].items():
            if rate > into["tokens_per_second"].get(name, 0.0):
                into["tokens_per_second"][name], into["microbatches"][name] = rate, row["microbatches"]
    return list(found.values())


def told(row: Mapping[str, Any]) -> str:
    """Return a row in one line."""
    speeds = ", ".join(f"{name} {rate:,.0f}" for name, rate in row["tokens_per_second"].items())
    link = row.get("nccl_ctas") or row.get("link_ms") or "as it is"
    return f"link {link}, {row['microbatches']} microbatches: tokens/s {speeds}; bit-equal {row.get('bit_equal', '-')}"
