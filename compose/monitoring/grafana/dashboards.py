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
    "Jobs, gangs and workers, stalls and hosts: whether all goes on, and where it does not.",
    (
        (
            "At a glance",
            (
                graph(
                    "Alerts",
                    "That fire now; each one's summary says what to do.",
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
                    "1: it answers and takes writes.",
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
                    "Phase", "Of each job.", ("", "meshrl_job_phase == 1"), kind="table", width=8
                ),
                graph("Steps", "Done by each job.", ("{{job}}", "meshrl_job_steps"), width=8),
                graph(
                    "Age of the last step",
                    "It falls with each step. The alert MeshJobNoStep is at ten minutes.",
                    ("{{job}}", "meshrl_job_step_age_seconds"),
                    unit="s",
                ),
                graph(
                    "Held",
                    "Jobs that wait for workers or are paused, and why.",
                    ("{{job}}: {{why}}", "meshrl_job_held"),
                    width=12,
                ),
                graph(
                    "Trajectories trained",
                    "A second, of each job.",
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
                    "What a look at the mesh, a decision and its writing take.",
                    ("look", 'max(meshrl_look_ms{kind="planner"})'),
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
                    "What somebody waits for; `meshrl status --stalled` names who and why.",
                    ("{{what}}", "sum by (what) (meshrl_stalls)"),
                ),
                graph("Hosts", "By state.", ("{{state}}", "meshrl_hosts"), stacked=True),
                graph(
                    "Ended unasked",
                    "Processes of each name, so far.",
                    ("{{service}}", "meshrl_process_ends"),
                ),
                graph(
                    "Disk left",
                    "Of each host's volume. Who finds it full waits.",
                    ("{{instance}} {{path}}", "meshrl_disk_free_bytes / meshrl_disk_size_bytes"),
                    unit="percentunit",
                ),
                graph(
                    "Round trip to Redis",
                    "From each host.",
                    ("{{service}}", "meshrl_trip_ms"),
                    unit="ms",
                ),
                graph(
                    "Clock",
                    "How far each host's is before that of Redis' host.",
                    ("{{service}}", "meshrl_ahead_ms"),
                    unit="ms",
                ),
            ),
        ),
    ),
)

RUN = Dashboard(
    "meshrl-job",
    "MeshRL: a job",
    "One job: what it learns, and where its time goes.",
    (
        (
            "Training",
            (
                graph("Reward", "Mean of the newest step.", *figures("reward")),
                graph("Loss", "Of the newest step.", *figures("loss")),
                graph("Gradient", "Its norm before clipping.", *figures("grad_norm")),
                graph("Entropy", "In nats a token.", *figures("entropy")),
                graph(
                    "Off policy",
                    "Divergence and the share of clipped tokens.",
                    *figures("kl", "clipped"),
                ),
                graph(
                    "Staleness",
                    "Weight versions that the trained tokens lag behind.",
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
                    "A second, by engine.",
                    (
                        "{{service}}",
                        rate("meshrl_tokens", f'{JOB},kind=~"engine|hybrid"', "service"),
                    ),
                    stacked=True,
                ),
                graph(
                    "Sequences",
                    "That engines generate, and that wait for a slot.",
                    ("running", f'sum(meshrl_running{{{JOB},kind=~"engine|hybrid"}})'),
                    ("waiting", f'sum(meshrl_waiting{{{JOB},kind=~"engine|hybrid"}})'),
                ),
                graph(
                    "Trajectories under way",
                    "By shard.",
                    ("{{service}}", f'meshrl_in_flight{{{JOB},kind="rollout"}}'),
                    stacked=True,
                ),
                graph(
                    "What became of trajectories",
                    "A second.",
                    *(
                        (fate, trajectories(fate))
                        for fate in ("trained", "filtered", "stale_requeued")
                    ),
                    *((fate, trajectories(fate)) for fate in ("typed_drops", "host_lost")),
                    stacked=True,
                ),
                graph(
                    "Too old, and failed",
                    "Shares of what was opened; alerts are at 25 % and 10 %.",
                    ("too old", share("stale_requeued")),
                    ("failed", share("typed_drops")),
                    unit="percentunit",
                ),
                graph(
                    "Engines' time",
                    "Share of a second in which an engine computes.",
                    (
                        "{{service}}",
                        rate("meshrl_busy_s", f'{JOB},kind=~"engine|hybrid"', "service"),
                    ),
                    unit="percentunit",
                ),
            ),
        ),
        (
            "Weights",
            (
                graph(
                    "Version",
                    "The trainer's step, and what each engine samples with.",
                    ("trainer", f'meshrl_step{{{JOB},kind="trainer"}}'),
                    ("{{service}}", f'meshrl_version{{{JOB},kind=~"engine|hybrid"}}'),
                ),
                graph(
                    "Versions behind",
                    "Each engine; algorithm.max_staleness refuses what is older.",
                    (
                        "{{service}}",
                        f'scalar(max(meshrl_step{{{JOB},kind="trainer"}}))'
                        f' - meshrl_version{{{JOB},kind=~"engine|hybrid"}}',
                    ),
                ),
                graph(
                    "Kept versions",
                    "Manifests in the store, of all jobs.",
                    ("manifests", 'sum(meshrl_manifests{kind="weights"})'),
                ),
            ),
        ),
        (
            "Sandbox",
            (
                graph(
                    "Calls under way",
                    "That run, and that wait for a worker of the sandbox.",
                    ("busy", f'sum(meshrl_busy{{{JOB},kind="sandbox"}})'),
                    ("waiting", f'sum(meshrl_waiting{{{JOB},kind="sandbox"}})'),
                ),
                graph(
                    "Outcomes",
                    "Of calls so far.",
                    (
                        "{{__name__}}",
                        f'{{__name__=~"meshrl_outcomes_.+",{JOB},kind="sandbox"}}',
                    ),
                ),
                graph(
                    "Sessions and jails",
                    "Open now, and workers that were replaced.",
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
    "What each process uses, and whether it answers.",
    (
        (
            "Processes",
            (
                graph(
                    "Answers", "1: its page answers.", ("{{service}}", f"meshrl_up{{{SERVICE}}}")
                ),
                graph(
                    "Ready",
                    "1: it is ready for work.",
                    ("{{service}}", f"meshrl_ready{{{SERVICE}}}"),
                ),
                graph(
                    "Event loop",
                    "How late it runs.",
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
                    "That it serves now.",
                    ("{{service}}", f"meshrl_serving{{{SERVICE}}}"),
                ),
                graph(
                    "Trouble",
                    "Errors, repeated calls, strangers turned away: so far.",
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
