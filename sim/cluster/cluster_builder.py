"""Builder of a scenario's cluster, and of the workloads of its jobs, drawn or from a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.accelerators import Accelerator, load_accelerators
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.job.emulation import (
    EmulatedTrainingSpeed,
    parse_engine_speed,
    parse_training_speed,
)
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.measurements import DecodeCurve
from meshrl.common.state.pool.demand.requirements import JobRequirements, PlannedJob
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.costs.rollout_costs import EngineGang
from meshrl.services.planner.forecast.engine_curves import get_curve as degree_curve
from meshrl.services.planner.layouts.layout_nodes import LayoutNode
from meshrl.sim.cluster.layout_search import LayoutQuery, search_layout, search_training_layout
from meshrl.sim.cluster.model.availability import (
    Availability,
    draw_availability,
    read_availability,
)
from meshrl.sim.cluster.model.cluster import SimCluster, SimHosts
from meshrl.sim.cluster.model.job import MAX_TRAJECTORY_TOKENS, JobSpec
from meshrl.sim.cluster.model.speeds import EmulatedSpeed, MeasuredSpeed, ModelSpeed, SimSpeed
from meshrl.sim.cluster.model.training import EmulatedTraining, ModelTraining, TrainingSpeed
from meshrl.sim.cluster.model.workload import (
    LogNormalWorkload,
    SimTurn,
    SimWorkload,
    ToolAnswer,
    ToolChainWorkload,
    TraceWorkload,
    TrajectoryScript,
)
from meshrl.sim.cluster.sources.scenario import JobTable, ModelTable, Scenario, WorkloadTable
from meshrl.sim.cluster.training_candidates import TrainingCapabilities
from meshrl.sim.drift import LinearDrift

UNBOUNDED_BIN_TOKENS = 1 << 30  # tokens of a bin, if none are declared


def build_cluster(scenario: Scenario, base: Path) -> SimCluster:
    """Build the cluster; relative paths start at `base`."""
    hosts = [one for one in scenario.hosts if one.count]
    if not hosts:
        raise ConfigError("the scenario has no hosts", fix="Set the count of one of [[hosts]]")
    if len(scenario.jobs) > 1 and any(one.colocated for one in scenario.jobs):
        raise ConfigError(
            "a colocated job uses all accelerators and allows no other job",
            fix="Remove the other jobs",
        )
    jobs = [_build_job(one, scenario.seed + n, hosts, base) for n, one in enumerate(scenario.jobs)]
    if scenario.jobs[0].colocated:
        if scenario.failures:
            raise ConfigError(
                "a colocated job does not support failures", fix="Remove [[failures]]"
            )
        now = scenario.switches
        jobs = [replace(jobs[0], max_staleness=0, switch_s=now.training_s, pull_s=now.rollout_s)]
    count = sum(one.count for one in hosts)
    for one in scenario.failures:
        if one.host >= count:
            raise ConfigError(
                f"host {one.host} does not exist: the scenario has {count} hosts",
                where="[[failures]] host",
            )
    availability = {
        n: _find_availability(one.availability, scenario, base)
        for n, one in enumerate(hosts)
        if one.availability
    }
    return SimCluster(
        hosts,
        jobs,
        scenario.switches,
        scenario.pool,
        scenario.failures,
        any(one.offload.use for one in scenario.jobs),
        availability,
        scenario.planner_interval_s,
    )


def _find_availability(name: str, scenario: Scenario, base: Path) -> Availability:
    """Return the segment of a name, or the contents of a CSV file."""
    for segment in scenario.segments:
        if segment.name == name:
            return draw_availability(segment)
    return read_availability(base / name)


def _build_job(job: JobTable, seed: int, hosts: Sequence[SimHosts], base: Path) -> JobSpec:
    shape, kind = _build_shape(job.model, job.name), hosts[0].kind
    for one in hosts if shape is not None else ():
        _get_accelerator(one.kind)
    workload = _build_workload(job.workload, job.group_size, seed, base)
    engines: tuple[int, ...] = ()
    known = bool(job.measured.base_s)
    if known:
        trains: TrainingSpeed = _build_training(job, kind)
    elif shape is None:
        if job.plan:
            raise ConfigError(f"job {job.name} has a plan, but no model", where="plan")
        if not (job.emulate and job.emulate_training):
            raise ConfigError(
                f"job {job.name} has neither a model nor emulated speeds of engines and training",
                where="[[jobs]]",
                fix="Set [jobs.model], or emulate and emulate_training",
            )
        trains = EmulatedTraining(
            parse_training_speed(job.emulate_training), job.bin_tokens or UNBOUNDED_BIN_TOKENS
        )
    else:
        query = _build_query(job, shape, hosts, workload)
        if job.plan:
            found = search_layout(query, job.plan == "uniform")
            # a single degree stays the only one
            has_fixed_layout = job.plan == "uniform" and not job.planner.moves
            degrees = sorted(set(found.tensor_parallel_sizes)) if has_fixed_layout else job.degrees
            job = replace(job, ranks=found.training.workers, degrees=degrees)
            trains, engines = (
                ModelTraining(shape, _get_accelerator(kind), found.training),
                found.tensor_parallel_sizes,
            )
        else:
            trains = ModelTraining(shape, _get_accelerator(kind), search_training_layout(query))
    allowed = tuple(sorted(set(job.degrees)))

    @cache
    def speed(kind: str, degree: int) -> SimSpeed:
        if known:
            return MeasuredSpeed(_build_curve(job, shape, kind, degree))
        if shape is None:
            return EmulatedSpeed(
                parse_engine_speed(job.emulate).with_tensor_parallel(degree), kind, degree
            )
        gang = EngineGang(shape, _get_accelerator(kind), degree)
        if not gang.can_fit(1):
            raise ConfigError(
                f"job {job.name} does not fit on {degree} {kind}",
                where="degrees",
                fix="Allow engines of more accelerators: degrees = [2, 4]",
            )
        return ModelSpeed(gang)

    return JobSpec(
        workload=workload,
        training_speed=trains,
        initial_tensor_parallel_sizes=engines,
        get_engine_speed=speed,
        name=job.name,
        steps=job.steps,
        groups_per_step=job.groups_per_step,
        group_size=job.group_size,
        max_staleness=job.max_staleness,
        slots=job.slots,
        bin_tokens=job.bin_tokens,
        requirements=JobRequirements(
            ranks=job.ranks,
            priority=job.priority,
            share=job.share,
            allows_hybrids=job.helped and job.tensor * job.pipeline == 1,
            tensor_parallel=allowed,
            can_time_slice=allowed[0] == 1 or job.offload.use,
            colocate="always" if job.offload.use else "auto",
        ),
        planner=job.planner,
        emulated_engine=job.emulate,
        emulated_training=job.emulate_training,
        pull_s=job.pull_s,
        offload=job.offload,
        get_arrival_s=_weights_arrival(job, shape),
        shape=shape,
        max_trajectory_tokens=job.workload.longest or MAX_TRAJECTORY_TOKENS,
        has_length_buckets=job.buckets and len(allowed) > 1,
    )


def _weights_arrival(job: JobTable, shape: ModelShape | None) -> Callable[[str, int], float]:
    """Return a function that computes the seconds until an engine has weights. Each of its
    accelerators receives its shard over its share of its host's network.
    """
    if job.links and shape is None:
        raise ConfigError(f"job {job.name} has links, but no model", where="links")

    def arrives_s(kind: str, degree: int) -> float:
        if not job.links or shape is None:
            return job.weights_s
        return (
            job.weights_s
            + shape.parameter_bytes / degree / _get_accelerator(kind).network_bytes_per_s
        )

    return arrives_s


def _build_shape(model: ModelTable, job: str) -> ModelShape | None:
    if not model.parameters:
        return None
    sizes = (model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim)
    if not all(sizes):
        raise ConfigError(
            f"the shape of job {job}'s model is incomplete",
            where="[jobs.model]",
            fix="Set layers, hidden, heads, kv_heads and head_dim, as in its config.json",
        )
    active = model.active or model.parameters
    return ModelShape(*sizes, model.parameters, active, model.experts, model.experts_per_token)


def _get_accelerator(kind: str) -> Accelerator:
    if kind not in load_accelerators():
        raise ConfigError(
            f"accelerator kind {kind!r} has no profile",
            where="[[hosts]] kind",
            fix=", ".join(load_accelerators()),
        )
    return load_accelerators()[kind]


def _build_curve(job: JobTable, shape: ModelShape | None, kind: str, degree: int) -> DecodeCurve:
    """Build the curve of measured engines for a degree and a kind. Degrees follow the planner's
    prediction. Other accelerators scale with their memory bandwidth and arithmetic.
    """
    of = job.measured
    bandwidth_ratio, busy = _compute_speed_ratios(of.kind, kind, job.name)
    curve = DecodeCurve(
        kind,
        of.degree,
        of.base_s / bandwidth_ratio,
        of.sequence_s / busy,
        of.context_s / bandwidth_ratio,
        of.prefill_tokens_per_s * busy,
        fitted_steps=1,
    )
    about = PlannedJob(job.name, Phase.TRAINING, model_shape=shape)
    found = degree_curve((kind, degree), {(kind, of.degree): curve}, about, Correction())
    assert found is not None
    return found


def _build_training(job: JobTable, kind: str) -> TrainingSpeed:
    of = job.measured
    if not of.train_tokens_per_s:
        raise ConfigError(
            f"job {job.name} has no training rate",
            where="[jobs.measured]",
            fix="Set train_tokens_per_s",
        )
    bandwidth_ratio, busy = _compute_speed_ratios(of.kind, kind, job.name)
    pace = EmulatedTrainingSpeed(of.train_tokens_per_s * busy, of.update_s / bandwidth_ratio)
    return EmulatedTraining(pace, job.bin_tokens or UNBOUNDED_BIN_TOKENS)


def _compute_speed_ratios(measured: str, kind: str, job: str) -> tuple[float, float]:
    """Return the ratios of two kinds of accelerators: of memory bandwidth and of arithmetic."""
    if measured == kind:
        return 1.0, 1.0
    if measured not in load_accelerators():
        raise ConfigError(
            f"job {job} was measured on {measured}, which has no profile: its times on {kind} "
            "are unknown",
            where="jobs.measured.kind",
            fix="Set the accelerator kind that it ran on: --set jobs.measured.kind=H100",
        )
    there, here = _get_accelerator(measured), _get_accelerator(kind)
    return (
        here.read_bytes_per_s / there.read_bytes_per_s,
        here.prefill_flops_per_s / there.prefill_flops_per_s,
    )


def _build_query(
    job: JobTable, shape: ModelShape, hosts: Sequence[SimHosts], workload: SimWorkload
) -> LayoutQuery:
    """Build the query of a layout search on hosts of the first kind."""
    stages, first = job.tensor * job.pipeline, hosts[0]
    total = first.count * first.accelerators
    ranks = total if job.colocated else job.ranks
    if ranks % stages:
        raise ConfigError(
            f"the core of job {job.name} has {ranks} ranks, not a multiple of {job.tensor} x "
            f"{job.pipeline}",
            where="ranks",
            fix=f"Set a multiple of {stages}",
        )
    trainable = TrainingCapabilities(
        (job.tensor,), (job.pipeline,), sharded=stages == 1, min_workers=1
    )
    if not job.plan:
        trainable = replace(trainable, min_workers=ranks, max_workers=ranks)
    nodes = [LayoutNode(first.kind, f"host{n}", first.accelerators) for n in range(first.count)]
    return LayoutQuery(
        job.name,
        shape,
        _get_accelerator(first.kind),
        nodes,
        workload,
        job.groups_per_step,
        job.group_size,
        job.slots,
        sorted(set(job.degrees)),
        trainable,
    )


def _build_workload(table: WorkloadTable, group_size: int, seed: int, base: Path) -> SimWorkload:
    """Build the workload of a job with groups of `group_size`; a relative path of a trace starts at
    `base`.
    """
    if table.trace:
        return TraceWorkload(_read_trace(base / table.trace), group_size)
    longest = float(table.longest) or math.inf
    median, sigma, tool_s = (
        LinearDrift(one.first, one.last or one.first)
        for one in (table.median, table.sigma, table.tool_s)
    )
    if not table.answers:
        return LogNormalWorkload(
            seed,
            table.turns,
            median,
            sigma,
            tool_s,
            table.prompt,
            max_tokens=longest,
            group_share=table.group_share,
        )
    answers = [
        ToolAnswer((a.tool, a.size, a.status), a.weight, a.seconds, a.tokens, a.ends, a.scale)
        for a in table.answers
    ]
    return ToolChainWorkload(seed, median, sigma, answers, table.turns, table.prompt, longest)


def _read_trace(path: Path) -> list[TrajectoryScript]:
    """Read the trajectories of a trace, one line each: `{"prompt": 512, "turns": [{"tokens": 200,
    "tool_s": 1.5, "answer": 40, "tool": "search", "size": "small", "status": "success"}]}`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reading the trace failed: {error}", where=str(path)) from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            turns = [_parse_turn(one) for one in row["turns"]]
            prompt = float(row.get("prompt", 0.0))
            if not turns or not 0 <= prompt < math.inf:
                raise ValueError(f"{len(turns)} turns after a prompt of {prompt} tokens")
            found.append(TrajectoryScript(prompt, turns))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}, line {number}: not a trajectory: {error}",
                fix='Write {"prompt": 512, "turns": [{"tokens": 200, "tool_s": 1.5}]}',
            ) from error
    if not found:
        raise ConfigError("the trace is empty", where=str(path))
    return found


def _parse_turn(row: dict[str, Any]) -> SimTurn:
    tokens, tool_s = float(row["tokens"]), float(row.get("tool_s", 0.0))
    if not (0 < tokens < math.inf and 0 <= tool_s < math.inf):
        raise ValueError(f"{tokens} tokens and {tool_s} s are not a valid turn")
    named = ("tool", "size", "status")
    state = tuple(str(row[name]) for name in named) if all(n in row for n in named) else None
    tool_state = (state[0], state[1], state[2]) if state else None
    return SimTurn(tokens, tool_s, float(row.get("answer", 0.0)), tool_state)
