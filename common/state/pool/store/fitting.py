"""Refuses jobs that the mesh could never run, before anything of them is packed or sent."""

from __future__ import annotations

import json
from collections.abc import Sequence

from meshrl.common.base.errors import Refused
from meshrl.common.job.isolation.isolation import MEANING
from meshrl.common.state import registry
from meshrl.common.state.pool.demand.needs import Need
from meshrl.common.state.pool.placing.fitting import never_fits
from meshrl.common.state.pool.placing.snapshot import PoolHost
from meshrl.common.state.pool.placing.taking import refusal
from meshrl.common.state.pool.store import store as pool
from meshrl.common.state.pool.workers.names import TAKEN
from meshrl.common.state.pool.workers.settings import PoolSettings
from meshrl.common.state.redis.client import State
from meshrl.common.state.redis.keys import MESH

SETTINGS = f"{MESH}:settings"  # what the launcher has told of the mesh


async def refuse_what_never_fits(state: State, need: Need) -> None:
    """Refused, with what the job takes and what there is, when it could not run even if it had all
    workers to itself, or when no host contains its model's code as it asks. A mesh that has no
    worker yet is not judged by them: they are joining.
    """
    if why := not_contained(await offers(state), need):
        raise Refused(why, fix="`meshrl doctor` on one of them says what is missing there")
    known = await pool.workers(state)
    if not known:
        return
    told = json.loads(await state.command("GET", SETTINGS) or "{}")
    settings = PoolSettings(**told.get("pool", {}))
    if why := never_fits(need, known, settings):
        raise Refused(why)


async def offers(state: State) -> list[PoolHost]:
    """The hosts of the mesh, with what each takes, those that are away for minutes among them."""
    return [pool.host_of(entry) for entry in await registry.entries(state, "node")]


def not_contained(hosts: Sequence[PoolHost], need: Need) -> str:
    """Why no sandbox of a job can be on any of these hosts, as each that takes sandboxes has said
    which isolation it has; empty when one may be. Where none takes them the job waits for one.
    """
    takes = [host for host in hosts if TAKEN["sandbox"] in host.takes]
    if not need.sandboxes or not takes:
        return ""
    why = {host.name: refusal(host, "sandbox", need) for host in takes}
    if any(host.trying for host in takes) or not all(why.values()):
        return ""
    said = "; ".join(f"{name} {said}" for name, said in sorted(why.items()))
    return (
        f"the job runs code that the model wrote in {MEANING[need.tier]} (sandbox.tier = "
        f"{need.tier}), and no host that takes sandboxes has it: {said}"
    )
