"""Generator of the dashboards in this folder, one line per graph: python3 dashboards.py.

docs/operate/alerts.md explains the series. A user chooses
`$job` and `$service` at the top of a dashboard. A legend is Grafana's, with labels in braces.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from graphs import Dashboard, graph, model

MINUTES = "[5m]"  # a rate is taken over: twenty scrapes
JOB = 'job="$job"'
SERVICE = 'service=~"$service"'
TROUBLE = "meshrl_(refused|repeated|failed|bad|late|casts_dropped).*_total"


def figures(*names: str) -> tuple[tuple[str, str], ...]:
    """Return the figures of the newest step of the chosen job."""
    return tuple((name, f'meshrl_job_last_step{{{JOB},of="{name}"}}') for name in names)


def rate(name: str, labels: str, by: str) -> str:
    """Return the rate per second of a counter, or of a gauge that only grows."""
    return f"sum by ({by}) (rate({name}{{{labels}}}{MINUTES}))"


def slices(name: str, by: str) -> str:
    """Return accelerators, as accelerator-seconds per second of the chosen job."""
    return rate(f"meshrl_job_{name}_seconds", JOB, by)


def trajectories(fate: str) -> str:
    """Return the trajectories per second of the chosen job, by their outcome."""
    return rate("meshrl_job_trajectories", f'{JOB},fate="{fate}"', "fate")


def share(fate: str) -> str:
    """Return the share of opened trajectories that end in this way."""
    opened = rate("meshrl_job_trajectories", f'{JOB},fate="opened"', "")
    return f"{trajectories(fate)} / on () {opened}"


MESH = Dashboard(
    "meshrl-mesh",
    "MeshRL: the mesh",
    "Jobs, gangs, workers, stalls and hosts: overall progress, and the location of problems.",
    (
        (
            "At a glance",
            (
                graph(
                    "Alerts",
                    "Alerts that fire now; the summary of each states what to do.",
                    ("", 'ALERTS{alertstate="firing",alertname=~"Mesh.*"}'),
                    kind="table",
                    width=12,
                ),
                graph(
                    "Leader",
                    "1: a planner leads.",
                    ("", 'meshrl_leader{service=""}'),
                    kind="stat",
                    width=3,
                ),
                graph(
                    "Redis",
                    "1: Redis answers and accepts writes.",
                    ("", "meshrl_redis_up"),
                    kind="stat",
                    width=3,
                ),
                graph("Hosts", "By state.", ("{{state}}", "meshrl_hosts"), kind="stat", width=3),
                graph(
                    "Workers",
                    "By state.",
                    ("{{state}}", 'meshrl_workers{state!=""}'),
                    kind="stat",
                    width=3,
                ),
            ),
        ),
        (
            "Jobs",
            (
                graph(
                    "Phase",
                    "Phase of each job.",
                    ("", "meshrl_job_phase == 1"),
                    kind="table",
                    width=8,
                ),
                graph(
                    "Steps",
                    "Steps that each job has completed.",
                    ("{{job}}", "meshrl_job_steps"),
                    width=8,
                ),
                graph(
                    "Age of the last step",
                    "Resets with each step. The alert MeshJobNoStep fires at ten minutes.",
                    ("{{job}}", "meshrl_job_step_age_seconds"),
                    unit="s",
                ),
                graph(
                    "Blocked jobs",
                    "Jobs that wait for workers or are paused, and why.",
                    ("{{job}}: {{why}}", "meshrl_job_held"),
                    width=12,
                ),
                graph(
                    "Trajectories trained",
                    "Trajectories a second, for each job.",
                    ("{{job}}", rate("meshrl_job_trajectories", 'fate="trained"', "job")),
                    width=12,
                ),
            ),
        ),
        (
            "Gangs and workers",
            (
                graph("Gangs", "By role.", ("{{role}}", "meshrl_gangs"), stacked=True),
                graph(
                    "Workers", "By state.", ("{{state}}", 'meshrl_workers{state!=""}'), stacked=True
                ),
                graph(
                    "Planner",
                    "Time of a mesh snapshot, of a decision, and of writing it.",
                    ("snapshot", 'max(meshrl_snapshot_ms{kind="planner"})'),
                    ("decide", 'max(meshrl_decide_ms{kind="planner"})'),
                    ("write", 'max(meshrl_write_ms{kind="planner"})'),
                    unit="ms",
                ),
            ),
        ),
        (
            "Stalls and hosts",
            (
                graph(
                    "Stalls",
                    "Overdue waits, by awaited call or resource; `meshrl status --stalled` "
                    "lists waiters and reasons.",
                    ("{{what}}", "sum by (what) (meshrl_stalls)"),
                ),
                graph("Hosts", "By state.", ("{{state}}", "meshrl_hosts"), stacked=True),
                graph(
                    "Unexpected exits",
                    "Number so far, by process name.",
                    ("{{service}}", "meshrl_process_ends"),
                ),
                graph(
                    "Free disk space",
                    "Share of each host's volume. Processes that find it full wait.",
                    ("{{instance}} {{path}}", "meshrl_disk_free_bytes / meshrl_disk_size_bytes"),
                    unit="percentunit",
                ),
                graph(
                    "Round trip to Redis",
                    "Measured at each host.",
                    ("{{service}}", "meshrl_redis_round_trip_ms"),
                    unit="ms",
                ),
                graph(
                    "Clock",
                    "Offset of each host's clock; positive: ahead of Redis' host.",
                    ("{{service}}", "meshrl_clock_ahead_ms"),
                    unit="ms",
                ),
            ),
        ),
    ),
)

RUN = Dashboard(
    "meshrl-job",
    "MeshRL: a job",
    "One job: its learning curves and the use of its time.",
    (
        (
            "Training",
            (
                graph("Reward", "Mean of the newest step.", *figures("reward")),
                graph("Loss", "Loss of the newest step.", *figures("loss")),
                graph("Gradient", "Gradient norm before clipping.", *figures("grad_norm")),
                graph("Entropy", "Entropy in nats per token.", *figures("entropy")),
                graph(
                    "Off policy",
                    "Divergence and the share of clipped tokens.",
                    *figures("kl", "clipped"),
                ),
                graph(
                    "Staleness",
                    "Weight versions by which trained tokens lag.",
                    *figures("staleness", "staleness_max"),
                ),
                graph(
                    "A step's time",
                    "The trainer waits for groups, then trains.",
                    *figures("wait_s", "train_s"),
                    unit="s",
                    stacked=True,
                ),
                graph(
                    "Steps",
                    "A minute.",
                    ("steps", f"60 * {rate('meshrl_job_steps', JOB, 'job')}"),
                ),
                graph(
                    "Tokens trained",
                    "A second.",
                    ("{{service}}", rate("meshrl_tokens", f'{JOB},kind="trainer"', "service")),
                ),
            ),
        ),
        (
            "Rollout",
            (
                graph(
                    "Tokens sampled",
                    "Tokens a second, by engine.",
                    (
                        "{{service}}",
                        rate("meshrl_tokens", f'{JOB},kind=~"engine|hybrid"', "service"),
                    ),
                    stacked=True,
                ),
                graph(
                    "Sequences",
                    "Requests that engines generate, and requests that wait for a slot.",
                    ("running", f'sum(meshrl_running{{{JOB},kind=~"engine|hybrid"}})'),
                    ("waiting", f'sum(meshrl_waiting{{{JOB},kind=~"engine|hybrid"}})'),
                ),
                graph(
                    "Trajectories in flight",
                    "By shard.",
                    ("{{service}}", f'meshrl_in_flight{{{JOB},kind="rollout"}}'),
                    stacked=True,
                ),
                graph(
                    "Outcomes of trajectories",
                    "A second.",
                    *(
                        (fate, trajectories(fate))
                        for fate in ("trained", "filtered", "stale_requeued")
                    ),
                    *((fate, trajectories(fate)) for fate in ("typed_drops", "host_lost")),
                    stacked=True,
                ),
                graph(
                    "Stale and failed",
                    "Shares of opened trajectories; alerts fire at 25 % and 10 %.",
                    ("stale", share("stale_requeued")),
                    ("failed", share("typed_drops")),
                    unit="percentunit",
                ),
                graph(
                    "Engines' time",
                    "Share of time in which an engine computes.",
                    (
                        "{{service}}",
                        rate("meshrl_busy_s", f'{JOB},kind=~"engine|hybrid"', "service"),
                    ),
                    unit="percentunit",
                ),
            ),
        ),
        (
            "Time slices",
            (
                graph(
                    "Accelerators",
                    "Accelerators that compute in time slices of the job, by function.",
                    ("{{function}}", slices("slice", "function")),
                    stacked=True,
                ),
                graph(
                    "Switches",
                    "Share of the job's accelerator time in which tensors are moved.",
                    (
                        "switches",
                        f"{slices('switch', 'job')} / "
                        f"({slices('switch', 'job')} + {slices('slice', 'job')})",
                    ),
                    unit="percentunit",
                ),
                graph(
                    "Hidden loads",
                    "Share of loaded bytes that prefetches loaded while others computed.",
                    ("hidden", f"meshrl_job_hidden_load_share{{{JOB}}}"),
                    unit="percentunit",
                ),
            ),
        ),
        (
            "Weights",
            (
                graph(
                    "Version",
                    "The trainer's version, and the version that each engine samples with.",
                    ("trainer", f'meshrl_step{{{JOB},kind="trainer"}}'),
                    ("{{service}}", f'meshrl_version{{{JOB},kind=~"engine|hybrid"}}'),
                ),
                graph(
                    "Versions behind",
                    "Lag of each engine; algorithm.max_staleness rejects older trajectories.",
                    (
                        "{{service}}",
                        f'scalar(max(meshrl_step{{{JOB},kind="trainer"}}))'
                        f' - meshrl_version{{{JOB},kind=~"engine|hybrid"}}',
                    ),
                ),
                graph(
                    "Retained versions",
                    "Manifests in the store, of all jobs.",
                    ("manifests", 'sum(meshrl_manifests{kind="weights"})'),
                ),
            ),
        ),
        (
            "Sandbox",
            (
                graph(
                    "Calls in flight",
                    "Calls that run, and calls that wait for a worker of the sandbox.",
                    ("busy", f'sum(meshrl_busy{{{JOB},kind="sandbox"}})'),
                    ("waiting", f'sum(meshrl_waiting{{{JOB},kind="sandbox"}})'),
                ),
                graph(
                    "Outcomes",
                    "Number of calls so far.",
                    (
                        "{{__name__}}",
                        f'{{__name__=~"meshrl_outcomes_.+",{JOB},kind="sandbox"}}',
                    ),
                ),
                graph(
                    "Sessions and jails",
                    "Open sessions and jails, and replaced workers.",
                    ("sessions", f'sum(meshrl_sessions{{{JOB},kind="sandbox"}})'),
                    ("jails", f'sum(meshrl_jails{{{JOB},kind="sandbox"}})'),
                    ("replaced", f'sum(meshrl_replaced{{{JOB},kind="sandbox"}})'),
                ),
            ),
        ),
    ),
    (("job", "label_values(meshrl_job_phase, job)", False),),
)

PROCESSES = Dashboard(
    "meshrl-processes",
    "MeshRL: processes",
    "Resource use and health of each process.",
    (
        (
            "Processes",
            (
                graph(
                    "Answers",
                    "1: the process answers with its metrics page.",
                    ("{{service}}", f"meshrl_up{{{SERVICE}}}"),
                ),
                graph(
                    "Ready",
                    "1: the process is ready for work.",
                    ("{{service}}", f"meshrl_ready{{{SERVICE}}}"),
                ),
                graph(
                    "Event loop",
                    "Lag of the event loop.",
                    ("{{service}}", f"meshrl_loop_lag_seconds{{{SERVICE}}}"),
                    unit="s",
                ),
                graph(
                    "CPU",
                    "Cores, children included.",
                    (
                        "{{service}}",
                        f"{rate('process_cpu_seconds_total', SERVICE, 'service')} + "
                        f"{rate('meshrl_cpu_children_seconds_total', SERVICE, 'service')}",
                    ),
                ),
                graph(
                    "Memory",
                    "Resident.",
                    ("{{service}}", f"process_resident_memory_bytes{{{SERVICE}}}"),
                    unit="bytes",
                ),
                graph(
                    "Descriptors",
                    "Open.",
                    ("{{service}}", f"process_open_fds{{{SERVICE}}}"),
                ),
                graph(
                    "Calls",
                    "Calls that the process serves now.",
                    ("{{service}}", f"meshrl_serving{{{SERVICE}}}"),
                ),
                graph(
                    "Errors",
                    "Errors, repeated calls and rejected unauthenticated peers so far.",
                    (
                        "{{service}} {{__name__}}",
                        f'{{__name__=~"{TROUBLE}",{SERVICE}}}',
                    ),
                ),
                graph(
                    "GPU",
                    "Utilization by worker, in percent; none without GPUs.",
                    ("{{of}}", "meshrl_gpu_utilization"),
                    unit="percent",
                ),
            ),
        ),
    ),
    (("service", "label_values(meshrl_up, service)", True),),
)


def main(directory: Path) -> None:
    """Writes each dashboard to a file of its uid."""
    for dashboard in (MESH, RUN, PROCESSES):
        path = directory / f"{dashboard.uid}.json"
        path.write_text(json.dumps(model(dashboard), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "dashboards")
