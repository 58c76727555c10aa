"""A line to a gateway of which it is not known yet whether it is there: what lies between may take
a connection and end it at once, as a forwarded port does before anybody listens behind it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshrl.common.api.gateway import Gateway
from meshrl.common.base.errors import PeerLost
from meshrl.common.mesh.access.ticket import read
from meshrl.common.mesh.transport.keys import KeyPair
from tests.load import scaled
from tests.unit.gateway.conftest import House, forwarded, line_to

FOREVER = 1_000_000


async def test_a_connection_that_ends_without_a_word_is_tried_again(house: House) -> None:
    ticket = read(house.token())
    async with (
        forwarded(ticket.address, 2) as port,
        line_to(replace(ticket, address=port.address)) as line,
    ):
        assert (await line.call(Gateway.jobs, None, scaled(60.0))).jobs == []
    assert port.came == 3


async def test_who_hears_nothing_until_the_end_is_told_what_that_may_be(house: House) -> None:
    ticket = read(house.token())
    async with forwarded(ticket.address, FOREVER) as port:
        ended = replace(ticket, address=port.address)
        another = replace(ticket, gateway=KeyPair.new().public.decode())
        for silent in (ended, another):
            async with line_to(silent) as line:
                with pytest.raises(PeerLost, match=r"nobody is behind that address.*another key"):
                    await line.call(Gateway.jobs, None, scaled(1.0))
    assert port.came > 1
