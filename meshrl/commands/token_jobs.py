"""Commands with a token: jobs on another user's mesh, identified by name."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from meshrl.client.client import Client, run_request
from meshrl.common.api.gateway import JobState
from meshrl.common.base.errors import DeadlineExceeded, Refused
from meshrl.common.state.jobs import Phase
from meshrl.runs.completion import EXIT_TIMED_OUT
from meshrl.runs.outcome import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from meshrl.view.history import decisions
from meshrl.view.live import console_tables


def show_status(token: str, name: str | None, as_json: bool) -> None:
    """Show the token's jobs, or one of them."""

    async def read_states(client: Client) -> list[JobState]:
        return await client.jobs() if name is None else [await client.job(name)]

    found = run_request(read_states, token=token)
    if as_json:
        print(json.dumps({"jobs": [asdict(state) for state in found]}))
        return
    table = console_tables.make_table("job", "phase", "steps", "version", "trained", "")
    for state in found:
        steps, note = f"{state.step}/{state.steps}", state.error or state.held
        version = "-" if state.version < 0 else str(state.version)
        table.add_row(state.name, state.phase, steps, version, str(state.trained), note)
    console_tables.print_table(table)


def watch_job(token: str, name: str) -> int:
    """Print the events of a job until it is over; return the exit status for its end."""

    async def follow(client: Client) -> JobState:
        async for event in client.events(name):
            print(decisions.format_event(event), flush=True)
        return await client.job(name)

    return _print_outcome(run_request(follow, token=token), as_json=False)


def wait_for_job(token: str, name: str, timeout_s: float | None, as_json: bool) -> int:
    """Return when a job is over, with the exit status for its end."""
    try:
        return _print_outcome(
            run_request(lambda client: client.wait(name, timeout_s), token=token), as_json
        )
    except DeadlineExceeded as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_TIMED_OUT


def cancel_job(token: str, name: str, as_json: bool) -> int:
    """End a job. Raises Refused when it has finished or failed already."""

    async def stopped(client: Client) -> tuple[bool, JobState]:
        return await client.stop(name), await client.job(name)

    changed, state = run_request(stopped, token=token)
    if not changed and state.phase != Phase.STOPPED:
        raise Refused(f"{name} has {state.phase} already: there is nothing to cancel")
    _print_state(state, as_json)
    return 0


def _print_outcome(state: JobState, as_json: bool) -> int:
    _print_state(state, as_json)
    return {Phase.FINISHED: EXIT_FINISHED, Phase.FAILED: EXIT_FAILED}.get(
        Phase(state.phase), EXIT_STOPPED
    )


def _print_state(state: JobState, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(state)))
        return
    why = f": {state.error}" if state.error else ""
    print(f"{state.name}: {state.phase} at step {state.step} of {state.steps}{why}")
