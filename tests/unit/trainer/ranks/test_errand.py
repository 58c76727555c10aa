"""What takes longer than a call is done once, however often it is asked for."""

from __future__ import annotations

import asyncio

import pytest

from meshrl.common.base.errors import RankLost, StorageFull
from meshrl.services.trainer.ranks.saving import Errand


class Work:
    """Goes on until it is let go; `ended` counts those that were given up, too."""

    def __init__(self) -> None:
        self.may, self.begun, self.ended = asyncio.Event(), 0, 0
        self.error: Exception | None = None

    async def done(self) -> int:
        self.begun += 1
        try:
            await self.may.wait()
        finally:
            self.ended += 1
        if self.error is not None:
            raise self.error
        return self.begun


async def test_it_goes_on_between_the_answers_and_its_result_stays() -> None:
    work, errand = Work(), Errand[int](0.0)
    for _ in range(3):
        assert await errand.asked(1, work.done) is None
    work.may.set()
    patient = 60.0
    errand._answer_s = patient
    for _ in range(2):  # an answer may be lost on its way
        assert await errand.asked(1, work.done) == 1
    assert await errand.asked(2, work.done) == 2


async def test_another_one_ends_it_and_who_still_asks_hears_of_that() -> None:
    first, second = Work(), Work()
    errand = Errand[int]()
    asking = asyncio.create_task(errand.asked(1, first.done))
    while not first.begun:
        await asyncio.sleep(0)
    second.may.set()
    assert await errand.asked(2, second.done) == 1
    with pytest.raises(RankLost, match="given up"):
        await asking
    assert first.ended == 1


async def test_who_stops_asking_does_not_end_it_and_its_error_is_told_to_all() -> None:
    work, errand = Work(), Errand[int]()
    asking = asyncio.create_task(errand.asked(1, work.done))
    while not work.begun:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    work.error = StorageFull("no room")
    work.may.set()
    for _ in range(2):
        with pytest.raises(StorageFull):
            await errand.asked(1, work.done)
    assert work.begun == 1
    await errand.close()
