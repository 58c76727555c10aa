"""Makes the cluster of a scenario, and the workloads of its jobs: what is drawn, or a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.profiles import Accelerator, declared
from meshrl.common.hardware.shapes import ModelShape
from meshrl.common.job.pace import TrainingPace, profile, training_profile
from meshrl.common.state.jobs import Phase
from meshrl.common.state.pool.demand.measured import Curve
from meshrl.common.state.pool.demand.needs import Need, PlannedJob
from meshrl.services.planner.costs.correction import Correction
from meshrl.services.planner.costs.rollout import EngineGang
from meshrl.services.planner.forecast.degrees import curve as degree_curve
from meshrl.services.planner.layouts.nodes import LayoutNode
from meshrl.sim.cluster.model.cluster import Cluster, SimHosts
from meshrl.sim.cluster.model.job import LONGEST, JobSpec
from meshrl.sim.cluster.model.speeds import MeasuredSpeed, ModelSpeed, PacedSpeed, SimSpeed
from meshrl.sim.cluster.model.training import ModelTraining, PacedTraining, TrainingSpeed
from meshrl.sim.cluster.model.workload import (
    Chain,
    LogNormal,
    Script,
    SimTurn,
    SimWorkload,
    ToolAnswer,
    Trace,
)
from meshrl.sim.cluster.planned import LayoutQuery, layout, planned
from meshrl.sim.cluster.sources.scenario import JobTable, ModelTable, Scenario, WorkloadTable
from meshrl.sim.cluster.ways import Trainable
from meshrl.sim.drift import Drift

FRAMED = 1 << 30  # tokens of a bin, where none are declared


def cluster_of(scenario: Scenario, base: Path) -> Cluster:
    """The cluster; files that are named relatively lie in `base`."""
    hosts = [one for one in scenario.hosts if one.count]
    if not hosts:
        raise ConfigError("the scenario has no hosts", fix="Give one of [[hosts]] a count")
    if len(scenario.jobs) > 1 and any(one.colocated for one in scenario.jobs):
        raise ConfigError("a colocated job has all accelerators", fix="Give it no other job")
    jobs = [_job(one, scenario.seed + n, hosts, base) for n, one in enumerate(scenario.jobs)]
    if scenario.jobs[0].colocated:
        if scenario.failures:
            raise ConfigError("a colocated job has no failures", fix="Leave [[failures]] out")
        now = scenario.switches
        jobs = [replace(jobs[0], max_staleness=0, switch_s=now.training_s, pull_s=now.rollout_s)]
    count = sum(one.count for one in hosts)
    for one in scenario.failures:
        if one.host >= count:
            raise ConfigError(
                f"host {one.host} fails, and there are {count}", where="[[failures]] host"
            )
    return Cluster(hosts, jobs, scenario.switches, scenario.pool, scenario.failures)


def _job(job: JobTable, seed: int, hosts: Sequence[SimHosts], base: Path) -> JobSpec:
    shape, kind = _shape(job.model, job.name), hosts[0].kind
    for one in hosts if shape is not None else ():
        _on(one.kind)
    workload = _workload(job.workload, job.group_size, seed, base)
    engines: tuple[int, ...] = ()
    known = bool(job.measured.base_s)
    if known:
        trains: TrainingSpeed = _measured_training(job, kind)
    elif shape is None:
        if job.plan:
            raise ConfigError(f"job {job.name} has no model to plan for", where="plan")
        if not (job.pace and job.training_pace):
            raise ConfigError(
                f"job {job.name} has neither a model nor a pace of engines and of training",
                where="[[jobs]]",
                fix="Write [jobs.model], or pace and training_pace",
            )
        trains = PacedTraining(training_profile(job.training_pace), job.bin_tokens or FRAMED)
    else:
        asked = _asked(job, shape, hosts, workload)
        if job.plan:
            found = planned(asked, job.plan == "uniform")
            stays = job.plan == "uniform" and not job.planner.moves  # one degree stays the only one
            degrees = sorted(set(found.engines)) if stays else job.degrees
            job = replace(job, ranks=found.training.workers, degrees=degrees)
            trains, engines = ModelTraining(shape, _on(kind), found.training), found.engines
        else:
            trains = ModelTraining(shape, _on(kind), layout(asked))
    allowed = tuple(sorted(set(job.degrees)))

    @cache
    def speed(kind: str, degree: int) -> SimSpeed:
        if known:
            return MeasuredSpeed(_measured(job, shape, kind, degree))
        if shape is None:
            return PacedSpeed(profile(job.pace).of_degree(degree), kind, degree)
        gang = EngineGang(shape, _on(kind), degree)
        if not gang.fits(1):
            raise ConfigError(
                f"job {job.name} does not fit on {degree} {kind}",
                where="degrees",
                fix="Let engines have more accelerators: degrees = [2, 4]",
            )
        return ModelSpeed(gang)

    return JobSpec(
        workload=workload,
        trains=trains,
        engines=engines,
        speed=speed,
        name=job.name,
        steps=job.steps,
        groups_per_step=job.groups_per_step,
        group_size=job.group_size,
        max_staleness=job.max_staleness,
        slots=job.slots,
        bin_tokens=job.bin_tokens,
        need=Need(
            ranks=job.ranks,
            priority=job.priority,
            share=job.share,
            helped=job.helped and job.tensor * job.pipeline == 1,
            degrees=allowed,
            alternates=allowed[0] == 1,
        ),
        planner=job.planner,
        pace=job.pace,
        training_pace=job.training_pace,
        pull_s=job.pull_s,
        arrives_s=_arrival(job, shape),
        shape=shape,
        longest=job.workload.longest or LONGEST,
        buckets=job.buckets and len(allowed) > 1,
    )


def _arrival(job: JobTable, shape: ModelShape | None) -> Callable[[str, int], float]:
    """Until an engine has weights: each of its accelerators gets its part of them by its part of
    its host's network.
    """
    if job.links and shape is None:
        raise ConfigError(f"job {job.name} has links, and no model", where="links")

    def arrives_s(kind: str, degree: int) -> float:
        if not job.links or shape is None:
            return job.weights_s
        return job.weights_s + shape.bytes / degree / _on(kind).network_bytes_per_s

    return arrives_s


def _shape(model: ModelTable, job: str) -> ModelShape | None:
    if not model.parameters:
        return None
    sizes = (model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim)
    if not all(sizes):
        raise ConfigError(
            f"the model of job {job} has no whole shape",
            where="[jobs.model]",
            fix="Write layers, hidden, heads, kv_heads and head_dim, as its config.json has them",
        )
    active = model.active or model.parameters
    return ModelShape(*sizes, model.parameters, active, model.experts, model.experts_per_token)


def _on(kind: str) -> Accelerator:
    if kind not in declared():
        raise ConfigError(
            f"there is no profile of accelerators {kind!r}",
            where="[[hosts]] kind",
            fix=", ".join(declared()),
        )
    return declared()[kind]


def _measured(job: JobTable, shape: ModelShape | None, kind: str, degree: int) -> Curve:
    """The curve of engines that were measured, for any degree as the planner predicts it, and on
    other accelerators in proportion to the bandwidth of their memory and their arithmetic.
    """
    of = job.measured
    reads, busy = _ratio(of.kind, kind, job.name)
    curve = Curve(
        kind,
        of.degree,
        of.base_s / reads,
        of.sequence_s / busy,
        of.context_s / reads,
        of.prefill_tokens_per_s * busy,
        steps=1,
    )
    about = PlannedJob(job.name, Phase.TRAINING, shape=shape)
    found = degree_curve((kind, degree), {(kind, of.degree): curve}, about, Correction())
    assert found is not None
    return found


def _measured_training(job: JobTable, kind: str) -> TrainingSpeed:
    of = job.measured
    if not of.train_tokens_per_s:
        raise ConfigError(
            f"job {job.name} has no rate of its training",
            where="[jobs.measured]",
            fix="Write train_tokens_per_s",
        )
    reads, busy = _ratio(of.kind, kind, job.name)
    pace = TrainingPace(of.train_tokens_per_s * busy, of.update_s / reads)
    return PacedTraining(pace, job.bin_tokens or FRAMED)


def _ratio(measured: str, kind: str, job: str) -> tuple[float, float]:
    """How much faster accelerators of a kind read, and compute, than those of another."""
    if measured == kind:
        return 1.0, 1.0
    if measured not in declared():
        raise ConfigError(
            f"job {job} was measured on {measured}, of which there is no profile: what it takes on "
            f"{kind} is not known",
            where="jobs.measured.kind",
            fix="Name what it ran on: --set jobs.measured.kind=H100",
        )
    there, here = _on(measured), _on(kind)
    return here.read_bytes_per_s / there.read_bytes_per_s, here.busy_flops / there.busy_flops


def _asked(
    job: JobTable, shape: ModelShape, hosts: Sequence[SimHosts], workload: SimWorkload
) -> LayoutQuery:
    """What its layout is searched for, on hosts of the first kind."""
    stages, first = job.tensor * job.pipeline, hosts[0]
    total = first.count * first.accelerators
    ranks = total if job.colocated else job.ranks
    if ranks % stages:
        raise ConfigError(
            f"the core of job {job.name} has {ranks} ranks, which {job.tensor} x "
            f"{job.pipeline} do not divide",
            where="ranks",
            fix=f"Give it a multiple of {stages}",
        )
    trainable = Trainable((job.tensor,), (job.pipeline,), sharded=stages == 1, least=1)
    if not job.plan:
        trainable = replace(trainable, least=ranks, most=ranks)
    nodes = [LayoutNode(first.kind, f"host{n}", first.accelerators) for n in range(first.count)]
    return LayoutQuery(
        job.name,
        shape,
        _on(first.kind),
        nodes,
        workload,
        job.groups_per_step,
        job.group_size,
        job.slots,
        sorted(set(job.degrees)),
        trainable,
    )


def _workload(table: WorkloadTable, size: int, seed: int, base: Path) -> SimWorkload:
    """The workload of a job's groups of `size`; a trace that is named relatively lies in `base`."""
    if table.trace:
        return Trace(_traced(base / table.trace), size)
    longest = float(table.longest) or math.inf
    median, sigma, tool_s = (
        Drift(one.first, one.last or one.first) for one in (table.median, table.sigma, table.tool_s)
    )
    if not table.answers:
        return LogNormal(seed, table.turns, median, sigma, tool_s, table.prompt, 1.0, longest)
    answers = [
        ToolAnswer((a.tool, a.size, a.status), a.weight, a.seconds, a.tokens, a.ends, a.scale)
        for a in table.answers
    ]
    return Chain(seed, median, sigma, answers, table.turns, table.prompt, longest)


def _traced(path: Path) -> list[Script]:
    """The trajectories of a trace, a line each: `{"prompt": 512, "turns": [{"tokens": 200,
    "tool_s": 1.5, "answer": 40, "tool": "search", "size": "small", "status": "success"}]}`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace cannot be read: {error}", where=str(path)) from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            turns = [_turn(one) for one in row["turns"]]
            prompt = float(row.get("prompt", 0.0))
            if not turns or not 0 <= prompt < math.inf:
                raise ValueError(f"{len(turns)} turns behind a prompt of {prompt} tokens")
            found.append(Script(prompt, turns))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}, line {number}: no trajectory: {error}",
                fix='Write {"prompt": 512, "turns": [{"tokens": 200, "tool_s": 1.5}]}',
            ) from error
    if not found:
        raise ConfigError("the trace is empty", where=str(path))
    return found


def _turn(row: dict[str, Any]) -> SimTurn:
    tokens, tool_s = float(row["tokens"]), float(row.get("tool_s", 0.0))
    if not (0 < tokens < math.inf and 0 <= tool_s < math.inf):
        raise ValueError(f"{tokens} tokens and {tool_s} s are no turn")
    named = ("tool", "size", "status")
    state = tuple(str(row[name]) for name in named) if all(n in row for n in named) else None
    returned = (state[0], state[1], state[2]) if state else None
    return SimTurn(tokens, tool_s, float(row.get("answer", 0.0)), returned)
