"""The notice of a host that has joined: told to end, it has the mesh move everything away from it,
for a while, and ends then.
"""

from __future__ import annotations

from collections.abc import Callable

from meshrl.common.api.gateway import Gateway
from meshrl.common.base.clock import Clock
from meshrl.common.base.errors import MeshError, NotAllowed, NotFound
from meshrl.launch.hosts.membership import Membership, gateway_line

LOOK_S = 0.5
ASK_S = 5.0
# Without an answer of the head: it may be starting again, or have been told to end as well.
SILENT_S = 15.0
LEAVE_S = 15.0
AGAIN_S = 2.0
HINDERED_S = 2.0  # between two starts of a process nothing of it runs


def say(text: str) -> None:
    print(text, flush=True)


async def empty(
    member: Membership, clock: Clock, for_s: float, hindered: Callable[[], str]
) -> bool:
    """Whether nothing is left on this host, after `for_s` at most; False at once when its own
    processes have been told to end as well, which `hindered` shows for a while.
    """
    began = heard = clock.monotonic()
    until = began + for_s
    say(f"{member.host} is told to end: everything moves away from it first, for {for_s:g} s")
    drains, left, silence = False, [""], ""
    works = began  # when it was last seen to do its work
    async with gateway_line(member.ticket) as line:
        while (now := clock.monotonic()) < until:
            if not (why := hindered()):
                works = now
            elif now - works > HINDERED_S:
                say(f"{member.host} cannot wait, as what runs here has ended: {why}")
                return False
            try:
                limit_s = min(ASK_S, until - now)
                if not drains:  # what it asked as it came back may be answered after that
                    await line.call(Gateway.drain, None, limit_s)
                found = await line.call(Gateway.remaining, None, limit_s)
            except (NotAllowed, NotFound) as error:
                say(f"{member.host} is no member of the mesh any more: {error.message}")
                return False
            except MeshError as error:
                if not silence:
                    say(f"the head cannot be asked to move anything away: {error}")
                silence = error.message
                if clock.monotonic() - heard > SILENT_S:
                    return False
            else:
                heard, silence, drains = clock.monotonic(), "", found.drains
                if drains and not found.names:
                    say(f"{member.host} is drained after {heard - began:.1f} s")
                    return True
                if found.names != left:
                    left = found.names
                    say(f"{member.host} waits for {', '.join(left)} to move away")
            await clock.sleep(min(LOOK_S, max(0.0, until - clock.monotonic())))
    say(f"{member.host} is not empty after {for_s:g} s: what is left begins anew elsewhere")
    return False


async def tell_back(member: Membership, clock: Clock, address: str) -> None:
    """Has the mesh use this host again, and know where it is now; tries until it is told."""
    silence = ""
    async with gateway_line(member.ticket) as line:
        while True:
            try:
                if await line.call(Gateway.back, address):
                    say(f"{member.host} is used again")
                return
            except (NotAllowed, NotFound):
                return  # whoever watches the membership says so
            except MeshError as error:
                if error.message != silence:
                    silence = error.message
                    say(f"the head cannot be told that {member.host} is back: {error}")
                await clock.sleep(AGAIN_S)


async def leave(member: Membership) -> bool:
    """Has the mesh forget this host, which has ended; whether it does."""
    async with gateway_line(member.ticket) as line:
        try:
            await line.call(Gateway.leave, None, LEAVE_S)
        except (NotAllowed, NotFound):
            pass  # it knows the host no more
        except MeshError as error:
            say(f"the head cannot be told that {member.host} leaves: {error}")
            return False
    say(f"{member.host} has left the mesh")
    return True
