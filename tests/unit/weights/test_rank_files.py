"""Rank 0 has the files of a rank on another host as chunks of the store."""

from __future__ import annotations

from pathlib import Path

from meshrl.common.api.ranks import RowsSaved
from meshrl.common.weights.store.weight_store import fetch_file
from meshrl.services.trainer.gang.saving import check_own
from tests.unit.trainer.ranks.test_rank_saving import GENERATION, order, saving, scratch
from tests.unit.weights.storing import Store

NAME = "step-000-000001-aa.core"
SAVED = RowsSaved(GENERATION, "elsewhere", NAME)


async def test_they_are_there_and_told_once_more_when_an_answer_was_lost(
    store: Store, tmp_path: Path
) -> None:
    rank = saving(tmp_path, store.mesh)
    await rank.save(order(NAME))
    written = tmp_path / f"checkpoints/{NAME}.1/state/part-00001-00000.safetensors"
    content = written.read_bytes()
    answers = [await rank.saved(SAVED) for _ in range(2)]
    files = answers[0].files
    check_own(1, files)
    assert list(files) == [written.name] and answers[1] == answers[0]
    assert not answers[0].trouble.code and not scratch(tmp_path)
    into = tmp_path / "there"
    await fetch_file(store.mesh, store.bulk, files[written.name], into, "a part")
    assert into.read_bytes() == content


async def test_what_hinders_them_is_an_answer(store: Store, tmp_path: Path) -> None:
    rank = saving(tmp_path, store.mesh)
    await rank.save(order(NAME))
    directory = tmp_path / f"checkpoints/{NAME}.1/state"
    (directory / "part-00001-00001.safetensors").symlink_to("/proc/self/mem")  # reading fails
    answer = await rank.saved(SAVED)
    assert answer.trouble.code and not answer.files and not scratch(tmp_path)
