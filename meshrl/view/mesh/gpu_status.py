"""GPUs of a mesh for people: their figures by worker, and their problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshrl.common.state.pool.workers.process_names import agent_name
from meshrl.common.state.pool.workers.rows import WorkerRow
from meshrl.view.mesh.mesh_snapshot import MeshSnapshot

STATS_PREFIX = "gpu_"  # prefix of an agent's figures, each a table by worker
GIB = 1 << 30
FIGURE_FORMATS = {
    "utilization": "{:.0%}",
    "temperature_celsius": "{} °C",
    "power_watts": "{:.0f} W",
}


def read_gpu_stats(worker: WorkerRow, stats: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a worker's GPU from the agent of its host; nothing for a CPU slot.

    `stats` are those of the live processes, by name.
    """
    return {
        key.removeprefix(STATS_PREFIX): table[worker.id]
        for key, table in stats.get(agent_name(worker.host), {}).items()
        if key.startswith(STATS_PREFIX) and isinstance(table, Mapping) and worker.id in table
    }


def format_gpu(stats: Mapping[str, Any]) -> str:
    """Return the figures in a few words: `62 of 80 GiB, 97 %, 71 °C, 650 W`; empty without any."""
    if stats.get("lost"):
        return "GPU lost"
    parts = []
    if "total_bytes" in stats:
        used = stats["used_bytes"] / GIB
        parts.append(f"{used:.0f} of {stats['total_bytes'] / GIB:.0f} GiB")
    parts += [text.format(stats[name]) for name, text in FIGURE_FORMATS.items() if name in stats]
    if reasons := stats.get("throttle_reasons"):
        parts.append(f"throttled by {', '.join(reasons)}")
    if errors := stats.get("ecc_uncorrected"):
        parts.append(f"{errors} uncorrected memory errors")
    return ", ".join(parts)


def list_gpu_problems(mesh: MeshSnapshot) -> list[str]:
    """Return which workers' GPUs are lost or have had errors, a line each."""
    stats = mesh.stats
    lines = []
    for worker in mesh.workers:
        found = read_gpu_stats(worker, stats)
        who = f"{worker.accelerator} of {worker.id} ({worker.uuid})"
        if found.get("lost"):
            lines.append(f"{who} is lost")
        elif errors := found.get("ecc_uncorrected"):
            lines.append(f"{who} had {errors} uncorrected memory errors")
    return lines


def format_gpu_event(fields: Mapping[str, Any]) -> str:
    """Return an event of kind `gpu` as a line."""
    who = f"{fields['gpu']} of {fields['worker']} ({fields['uuid']})"
    if fields["what"] == "lost":
        return f"{who} is lost: {fields['why']}"
    if fields["what"] == "back":
        return f"{who} is back: {fields['why']}"
    parts = []
    if count := int(fields.get("uncorrected", 0)):
        parts.append(f"{count} uncorrected memory errors")
    if xids := fields.get("xids"):
        parts.append(f"XID {', '.join(map(str, xids))}")
    return f"{who} had {' and '.join(parts)}: drain its host and check `nvidia-smi -q`"
