"""Table of small forms of the load tests that docs/benchmarks.md documents.

Each form takes the real code path with tiny sizes. All its processes together use at most five
CPU-seconds, unless its `reason` says why they use more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Smoke:
    """Small form of a documented command.

    In `form`, `{run}` stands for the record of a run, `{templates}` for a folder of chat templates
    and `{mesh}` for the root of a mesh that listens.
    """

    command: str  # as documented, without what is in brackets
    form: str  # what follows `python -m`
    keys: tuple[str, ...] = ()  # documented keys that it prints; none: all that LACKING leaves
    reason: str = ""  # for more than five CPU-seconds
    needs: tuple[str, ...] = ()  # backends of the host


MESH = "a whole mesh starts: some ten processes, a few of which load torch"
MESHES = "several whole meshes start, one after the other"
HOSTS = "a whole mesh starts on hosts that are namespaces"
CONTESTANTS = "each contestant and the maker of their model load torch, some with transformers"
TORCH = "several processes load torch, at two CPU-seconds each"
COMPILER = "FSDP loads torch's compiler, which takes three CPU-seconds"
LIMITS = "jails use up the limits that end them"
DIGITS = "tests/mesh/jobs/digits.toml"
TINY = (  # of examples/calculator.toml
    "--set warm_start.steps=1 --set algorithm.groups_per_step=2 --set algorithm.group_size=2 "
    "--set rollout.max_tokens=64 --set algorithm.filter_zero_variance=false"
)
TINY_DEMO = TINY.replace("--set", "--demo-set")
SPIN = "--tries 1 --limit-s 0.5 --noise-s 0.3 --noisy-rounds 1"  # of jails that spin

SMOKES: tuple[Smoke, ...] = (
    Smoke("loadtests.rpc", "loadtests.rpc --calls --rounds 1 --seconds 0.02"),
    Smoke("loadtests.rpc --curve", "loadtests.rpc --curve --rounds 2 --seconds 0.02"),
    Smoke("loadtests.rpc --payloads", "loadtests.rpc --payloads --rounds 1 --seconds 0.01"),
    Smoke("loadtests.overhead", f"loadtests.overhead --steps 1 {TINY}", reason=MESH),
    Smoke(
        "loadtests.engine",
        "loadtests.engine --rounds 1 --new 2 --long 32 --at-once 2",
        reason=CONTESTANTS,
    ),
    Smoke(
        "loadtests.longtail",
        "loadtests.longtail --rounds 1 --requests 8 --mean 4 --context 64 --table-steps 2 "
        "--contexts 16 32",
        reason=CONTESTANTS,
    ),
    Smoke(
        "loadtests.bulk",
        "loadtests.bulk --rounds 1 --mib 64",
        ("*_mb_per_s", "*_cpu_s_per_gb", "ratio_*", "handshake_ms_keys", "handshake_ms_tls"),
    ),
    Smoke(
        "loadtests.bulk",
        "loadtests.bulk --gib 0.02",
        ("put_mb_per_s", "fetch_mb_per_s", "serving_rss_mib"),
    ),
    Smoke(
        "loadtests.weights",
        "loadtests.weights --arms one_host --rounds 1 --one-host-mib 4",
        (
            "pull_share_of_memcpy",
            "hash_share",
            "copy_share",
            "hash_gb_s",
            "sha256_gb_s",
            "memcpy_gb_s",
            "ratio_gloo",
            "ratio_http",
            "ratio_gloo_wall",
            "ratio_http_wall",
            "*_wall",
            "copies_per_byte",
        ),
        TORCH,
    ),
    Smoke(
        "loadtests.weights",
        "loadtests.weights --arms codec --rounds 1 --codec-mib 4",
        (
            "delta_bytes_share_1pct",
            "delta_bytes_share_02pct",
            "encode_gb_s_*",
            "apply_gb_s_*",
            "*_took_s",
            "misses",
            "valid",
        ),
    ),
    Smoke(
        "loadtests.weights",
        "loadtests.weights --arms adapters --rounds 1",
        ("multi_adapter_ratio", "one_over_merged", "logprob_gap"),
        "its engines decode at a fixed size",
    ),
    Smoke("loadtests.moves", "loadtests.moves --tokens 128 --rounds 1", reason=TORCH),
    Smoke(
        "loadtests.kvload --arms sweep sockets",
        "loadtests.kvload --arms sweep sockets --rounds 1 --points 1M:1024:1",
    ),
    Smoke(
        "loadtests.kvload --arms busy turns cost",
        "loadtests.kvload --arms busy turns cost --rounds 1 --model 1M --long 1024 --prompt 64",
        reason="22 requests decode 150 tokens each, and conversations have turns",
    ),
    Smoke(
        "loadtests.zebra",
        "loadtests.zebra --rounds 1 --settings D1:4096 --tokens 8 --longest-s 0.01",
        reason=f"four ranks compute steps of five arms; {COMPILER}",
    ),
    Smoke(
        "loadtests.routing",
        "loadtests.routing --rounds 1 --prompts 2 --samples 2",
        reason=TORCH,
    ),
    Smoke(
        "sim.mesh --seeds 0:20 --hours 0.05",
        "sim.mesh --seeds 0:1 --hours 0.001 --budget 1 --faults none",
        reason=COMPILER,
    ),
    Smoke(
        "loadtests.ledger",
        "loadtests.ledger --kill-seconds 0 --seconds 1 --engines 2 --in-flight 4 --warm 0.5",
        (
            "service_cores",
            "loop_lag_p99_ms",
            "loop_lag_own_p99_ms",
            "tokens_per_s",
            "write_amplification",
        ),
        TORCH,
    ),
    Smoke(
        "loadtests.ledger",
        "loadtests.ledger --seconds 0 --kill-seconds 3 --kill-every 2 --serving 1 --standing-by 1 "
        "--killed-in-flight 4",
        ("lost", "redecoded_beyond_flush", "asked_beyond_ledger", "exact_outputs"),
        TORCH,
    ),
    Smoke("loadtests.packing", "loadtests.packing --rounds 1 --sequences 64 --trained 16"),
    Smoke(
        "loadtests.models --configs 150 --seed 0",
        "loadtests.models --configs 1 --paths native",
        reason="torch and transformers are loaded",
    ),
    Smoke(
        "loadtests.ranks --ranks 4",
        "loadtests.ranks --ranks 2 --layers 1 --vocabulary 512 --hidden 64 --ffn 128",
        reason=COMPILER,
    ),
    Smoke(
        "loadtests.trainer",
        "loadtests.trainer packing --passes 1 --sequences 64 --trained 16",
        ("packed_speedup", "padding_bound", "lockstep_ratio_best_peer", "plan_ms_*"),
    ),
    Smoke(
        "loadtests.trainer",
        "loadtests.trainer checkpoint --steps 2",
        ("checkpoint_pause_s",),
        MESH,
    ),
    Smoke(
        "loadtests.trainer",
        "loadtests.trainer recovery --repeats 1",
        ("recovery_s", "recovery_cpu_s", "recovery_steps_s"),
        MESH,
    ),
    Smoke(
        "loadtests.trainer",
        f"loadtests.trainer demo --demo-steps 1 {TINY_DEMO}",
        ("logprob_gap_max", "logprob_kl"),
        MESH,
    ),
    Smoke("loadtests.planning", "loadtests.planning --workers 16 --repeats 1"),
    Smoke("loadtests.plan", "loadtests.plan --cases 1 --peers 1"),
    Smoke(
        "loadtests.replay",
        "loadtests.replay --steps 3 --deaths waiting@2 --stopped-after 1 "
        "--changed-deaths computing@3",
        reason=MESHES,
    ),
    Smoke("loadtests.meetings", "loadtests.meetings --pairs 2"),
    Smoke(
        "loadtests.sleep_wake",
        "loadtests.sleep_wake --no-run --rounds 1 --large-rounds 0",
        (
            "*_memory_sleep_s",
            "*_memory_sleep_gb_s",
            "*_memory_wake_s",
            "*_disk_sleep_s",
            "*_disk_wake_s",
            "*_memcpy_s",
            "*_memcpy_fresh_s",
            "*_dd_write_s",
            "*_dd_read_s",
            "*_rss_released",
        ),
    ),
    Smoke(
        "loadtests.sleep_wake",
        "loadtests.sleep_wake --no-speed --steps 2 --die memory@1",
        ("bit_identical", "bit_identical_after_death"),
        MESHES,
    ),
    Smoke(
        "loadtests.start",
        "loadtests.start roles --repeats 1 --kinds shard",
        (
            "*_ready_s",
            "*_cpu_s",
            "*_spawned_ready_s",
            "*_spawned_cpu_s",
            "role_ready_s",
            "role_cpu_s",
            "spawned_*",
            "spawned_ready_s",
            "spawned_cpu_s",
            "nursery_cpu_s_per_start",
        ),
        TORCH,
    ),
    Smoke(
        "loadtests.start",
        "loadtests.start mesh --repeats 1",
        (
            "pss_mb",
            "pss_spawned_mb",
            "restart_s",
            "restart_spawned_s",
            "move_decided_s",
            "move_spawned_decided_s",
            "move_s",
            "move_spawned_s",
        ),
        MESHES,
    ),
    Smoke(
        "loadtests.start",
        "loadtests.start churn --starts 8",
        ("starts_per_s", "starts_wrong", "leaked"),
        COMPILER,
    ),
    Smoke(
        "loadtests.start",
        "loadtests.start orphans --trials 4",
        ("orphans", "orphan_trials", "hung"),
        COMPILER,
    ),
    Smoke("loadtests.runners", "loadtests.runners --rounds 1", needs=("bwrap", "python3")),
    Smoke(
        "loadtests.sandbox",
        "loadtests.sandbox --seconds 0.3 --rounds 1 --concurrency 1 64 --trusted 20 "
        f"--leak-calls 10 {SPIN}",
        reason=f"64 calls at a time start an interpreter each, in five ways; {LIMITS}",
        needs=("bwrap",),
    ),
    Smoke(
        "loadtests.sandbox_cpu",
        f"loadtests.sandbox_cpu --seconds 0.3 {SPIN}",
        reason=LIMITS,
        needs=("bwrap",),
    ),
    Smoke(
        "loadtests.sandbox_soak",
        "loadtests.sandbox_soak --seconds 2 --callers 2",
        needs=("bwrap",),
    ),
    Smoke(
        "loadtests.planner_state",
        "loadtests.planner_state --gangs 8 --jobs 2 --repeats 2 --workers 2 4 --seconds 1 "
        "--rounds 1",
    ),
    Smoke("loadtests.chat_templates FOLDER...", "loadtests.chat_templates {templates}"),
    Smoke("loadtests.soak", "loadtests.soak --minutes 0.05", reason=MESH),
    Smoke(
        "loadtests.plain",
        f"loadtests.plain --steps 1 --problems 2 {TINY}",
    ),
    Smoke(
        "loadtests.doors tests/mesh/jobs/digits.toml --set budget.steps=500",
        f"loadtests.doors {DIGITS} --set budget.steps=30",
        reason=MESH,
        needs=("root",),
    ),
    Smoke("loadtests.doors.matrix .meshrl", "loadtests.doors.matrix {mesh}", reason=MESH),
    Smoke(
        "loadtests.hosts",
        f"loadtests.hosts {DIGITS} --arms doors",
        (
            "host_cores",
            "router_cores",
            "lost",
            "trained_twice",
            "host_lost",
            "refused_without_key",
            "role_matrix_errors",
            "planting_tried",
            "planted",
        ),
        HOSTS,
        ("netns",),
    ),
    Smoke(
        "loadtests.hosts.flood",
        "loadtests.hosts.flood --frames 200 --waves 2 --settle-s 0.5 --calm-s 0.5",
        reason=MESH,
    ),
    Smoke("loadtests.mistakes", "loadtests.mistakes --only UTF-8"),
    Smoke(
        "loadtests.chaos JOB --faults kill,stop,damage,full --count 10 --seed 1",
        f"loadtests.chaos {DIGITS} --faults kill --count 1",
        reason=MESH,
    ),
    Smoke(
        "loadtests.jobs",
        f"loadtests.jobs {DIGITS} --arms pair --steps 2 --seeds 0,1",
        ("lost", "trained_twice", "late_share", "host_cores", "steal_cores", "valid"),
        MESH,
    ),
    Smoke(
        "loadtests.jobs",
        f"loadtests.jobs {DIGITS} --arms preempt --moves 1 --seeds 0,1",
        ("preempt_s",),
        MESH,
    ),
    Smoke(
        "loadtests.regret",
        "loadtests.regret --arms virtual --seeds 16:17 --processes 1 --steps 2",
        (
            "far_defaults",
            "moves",
            "moves_that_paid",
            "prediction_error_p50",
            "regret_p50",
            "regret_p90",
        ),
        COMPILER,
    ),
    Smoke(
        "loadtests.simulator",
        "loadtests.simulator --arms virtual,broad --seeds 16:17 --processes 1 --steps 1 --gangs 4",
        ("step_time_error", "broad_step_time_error", "speed_up"),
        COMPILER,
    ),
    Smoke(
        "loadtests.elastic",
        "loadtests.elastic --steps 2 --splits 1",
        (
            "moves",
            "planner_cpu_share",
            "ratio_best_static",
            "ratio_worst_static",
            "ratio_span",
            "switch_s",
            "switch_share",
        ),
        MESHES,
    ),
    Smoke(
        "loadtests.elastic",
        "loadtests.elastic --steps 2 --churn",
        ("moves_under_churn",),
        MESH,
    ),
    Smoke("loadtests.history RUN", "loadtests.history {run}"),
    Smoke("loadtests.damage --jobs 2", "loadtests.damage --count 1", reason=MESHES),
)

CAPPED = "its arm needs hosts that are namespaces, and links of real speeds"
LARGE = "its arm trains on a whole mesh"
TRL = "its part needs TRL, which `make peers` builds"
STEPS = "its part trains dozens of steps"
PUT = "its arm puts versions of 300 MiB in place"
RUNSC = "needs runsc"
SEVERAL = "its arm needs two further meshes, or one for minutes"

# Documented keys that no form prints: command -> key -> reason.
LACKING: Mapping[str, Mapping[str, str]] = {
    "loadtests.weights": {
        "peak_over_share": LARGE,
        "peaks_mib_*": LARGE,
        "real_changed_share": LARGE,
        "pause_p50_ms": PUT,
        "pause_p99_ms": PUT,
        "pause_p99_over_bound": PUT,
        "put_ms": PUT,
        "fanout_16_over_4": CAPPED,
        "fanout_16_s": CAPPED,
        "source_copies_sent": CAPPED,
        "ratio_full_over_delta_3pct": CAPPED,
        "ratio_full_over_delta_1pct": CAPPED,
        "first_token_s": CAPPED,
        "first_token_s_16": CAPPED,
        "engine_step_ms": PUT,
    },
    "loadtests.trainer": {
        "ratio_trl_equal": TRL,
        "*_cpu_s_equal": TRL,
        "ratio_trl_longtail": TRL,
        "longtail_tenth_share": TRL,
        "reward_mesh": TRL,
        "reward_trl": TRL,
        "speedup_2_ranks": STEPS,
        "speedup_hybrid": STEPS,
        "join_pause_share": STEPS,
    },
    "loadtests.jobs": {
        "accuracy_gap_pair": SEVERAL,
        "accuracy_gap_quad": SEVERAL,
        "solo_spread": SEVERAL,
        "share_error_1_1": SEVERAL,
        "share_error_1_3": SEVERAL,
        "makespan_ratio": SEVERAL,
        "role_change_s_*": SEVERAL,
        "others_rate": SEVERAL,
    },
    "loadtests.hosts": {
        "accuracy": SEVERAL,
        "ratio_one_host": SEVERAL,
        "ratios": SEVERAL,
        "recover_s": SEVERAL,
        "stall_named_s": SEVERAL,
        "leaders_per_token": SEVERAL,
        "join_s": SEVERAL,
        "drain_s": SEVERAL,
    },
    "loadtests.regret": {"demo_time_ratio": SEVERAL, "real_*": SEVERAL},
    "loadtests.simulator": {"real_step_time_error": SEVERAL},
    "loadtests.runners": {
        "runsc_p50_ms": RUNSC,
        "runsc_do_p50_ms": RUNSC,
        "escape_programs": RUNSC,
        "escaped": RUNSC,
    },
}
# Documented commands without a form: command -> reason.
WITHOUT: Mapping[str, str] = {}
