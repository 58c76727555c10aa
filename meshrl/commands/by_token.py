"""Commands that are given a token: jobs on a mesh of somebody else's, which are known by name."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from meshrl.client.client import Client, request
from meshrl.common.api.gateway import JobState
from meshrl.common.base.errors import DeadlineExceeded, Refused
from meshrl.common.state.jobs import Phase
from meshrl.run.outcome import FAILED, FINISHED, STOPPED
from meshrl.run.waiting import TIMED_OUT
from meshrl.view.history import decisions
from meshrl.view.live import printing


def status(token: str, name: str | None, as_json: bool) -> None:
    """Shows the token's jobs, or one of them."""

    async def look(client: Client) -> list[JobState]:
        return await client.jobs() if name is None else [await client.job(name)]

    found = request(look, token=token)
    if as_json:
        print(json.dumps({"jobs": [asdict(state) for state in found]}))
        return
    table = printing.table("job", "phase", "steps", "version", "trained", "")
    for state in found:
        steps, note = f"{state.step}/{state.steps}", state.error or state.held
        table.add_row(state.name, state.phase, steps, str(state.version), str(state.trained), note)
    printing.show(table)


def watch(token: str, name: str) -> int:
    """Prints what happens to a job until it is over; the exit status says how it ended."""

    async def follow(client: Client) -> JobState:
        async for event in client.events(name):
            print(decisions.told(event), flush=True)
        return await client.job(name)

    return _ended(request(follow, token=token), as_json=False)


def wait(token: str, name: str, timeout_s: float | None, as_json: bool) -> int:
    """Returns when a job is over, with the exit status for its end."""
    try:
        return _ended(request(lambda client: client.wait(name, timeout_s), token=token), as_json)
    except DeadlineExceeded as error:
        print(f"error: {error}", file=sys.stderr)
        return TIMED_OUT


def cancel(token: str, name: str, as_json: bool) -> int:
    """Ends a job; Refused when it has finished or failed already."""

    async def stopped(client: Client) -> tuple[bool, JobState]:
        return await client.stop(name), await client.job(name)

    changed, state = request(stopped, token=token)
    if not changed and state.phase != Phase.STOPPED:
        raise Refused(f"{name} has {state.phase} already: there is nothing to cancel")
    _print(state, as_json)
    return 0


def _ended(state: JobState, as_json: bool) -> int:
    _print(state, as_json)
    return {Phase.FINISHED: FINISHED, Phase.FAILED: FAILED}.get(Phase(state.phase), STOPPED)


def _print(state: JobState, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(state)))
        return
    why = f": {state.error}" if state.error else ""
    print(f"{state.name}: {state.phase} at step {state.step} of {state.steps}{why}")
