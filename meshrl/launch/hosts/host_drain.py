"""Drain of a joined host: on its stop order the mesh moves everything off it for a while."""

from __future__ import annotations

from collections.abc import Callable

from meshrl.common.api.gateway import Gateway, NoticeReport
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import MeshError, NotAllowed, NotFound
from meshrl.launch.hosts.membership import Membership, connect_gateway

POLL_S = 0.5
CALL_TIMEOUT_S = 5.0
# Without an answer of the head: it may be restarting, or have a stop order as well.
HEAD_SILENCE_LIMIT_S = 15.0
LEAVE_TIMEOUT_S = 15.0
RETRY_S = 2.0
UNREADY_LIMIT_S = 2.0  # between two starts of a process nothing of it runs
STOP_S = 30.0  # of the time until the platform kills the host, for an orderly stop


def print_line(text: str) -> None:
    print(text, flush=True)


def limit_drain(drain_s: float, grace_s: float) -> float:
    """Return the time limit of a drain in seconds, so that an orderly stop follows it.

    `grace_s`: from the stop order until the platform kills the host; 0: not known.
    """
    return min(drain_s, max(grace_s - STOP_S, grace_s / 2)) if grace_s else drain_s


async def drain_host(
    member: Membership, clock: Clock, timeout_s: float, unready_reason: Callable[[], str]
) -> bool:
    """Return True if nothing is left on this host, after at most `timeout_s`.

    Returns False at once when its own processes have a stop order too, which `unready_reason` shows
    for a while.
    """
    began = last_answer_s = clock.monotonic()
    until = began + timeout_s
    print_line(f"{member.host} received a stop order: it drains for up to {timeout_s:g} s")
    notice = NoticeReport("its stop order", clock.wall() + timeout_s, "")
    drains, waiting_names, silence = False, [""], ""
    last_ready_s = began  # when it last did its work
    async with connect_gateway(member.member_token) as line:
        while (now := clock.monotonic()) < until:
            if not (why := unready_reason()):
                last_ready_s = now
            elif now - last_ready_s > UNREADY_LIMIT_S:
                print_line(
                    f"{member.host} stops draining, because its own processes have ended: {why}"
                )
                return False
            try:
                limit_s = min(CALL_TIMEOUT_S, until - now)
                if not drains:  # the answer to its return request may come after that
                    await line.call(Gateway.notice, notice, limit_s)
                found = await line.call(Gateway.remaining, None, limit_s)
            except (NotAllowed, NotFound) as error:
                print_line(f"{member.host} is no longer a member of the mesh: {error.message}")
                return False
            except MeshError as error:
                if not silence:
                    print_line(f"the drain request to the head failed: {error}")
                silence = error.message
                if clock.monotonic() - last_answer_s > HEAD_SILENCE_LIMIT_S:
                    return False
            else:
                last_answer_s, silence, drains = clock.monotonic(), "", found.is_draining
                if drains and not found.names:
                    print_line(f"{member.host} is drained after {last_answer_s - began:.1f} s")
                    return True
                if found.names != waiting_names:
                    waiting_names = found.names
                    print_line(f"{member.host} waits for {', '.join(waiting_names)} to move away")
            await clock.sleep(min(POLL_S, max(0.0, until - clock.monotonic())))
    print_line(
        f"{member.host} is not empty after {timeout_s:g} s: its remaining work restarts on "
        "other hosts"
    )
    return False


async def report_returned(member: Membership, clock: Clock, address: str) -> None:
    """Report to the mesh that this host is usable again, and at which address; retry until it
    succeeds.
    """
    silence = ""
    async with connect_gateway(member.member_token) as line:
        while True:
            try:
                if await line.call(Gateway.back, address):
                    print_line(f"{member.host} accepts work again")
                return
            except (NotAllowed, NotFound):
                return  # the membership watcher reports it
            except MeshError as error:
                if error.message != silence:
                    silence = error.message
                    print_line(f"reporting the return of {member.host} to the head failed: {error}")
                await clock.sleep(RETRY_S)


async def leave_mesh(member: Membership) -> bool:
    """Make the mesh forget this host, which has ended; return whether it did."""
    async with connect_gateway(member.member_token) as line:
        try:
            await line.call(Gateway.leave, None, LEAVE_TIMEOUT_S)
        except (NotAllowed, NotFound):
            pass  # the mesh has forgotten the host
        except MeshError as error:
            print_line(f"reporting to the head that {member.host} leaves failed: {error}")
            return False
    print_line(f"{member.host} has left the mesh")
    return True
