"""A checkpoint's model is read from the store: what is damaged there is written again, as long as
the trainer still has it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshrl.common.base.errors import Damaged, NotFound
from meshrl.services.trainer.versions.publishing import VersionIdentity
from tests.unit.common.base.files.harms import Harm, delete, flip
from tests.unit.trainer.versions.test_restoring import Trained, trained


async def staged(bench: Trained) -> None:
    """The weights of step 2 lie in the store."""
    bench.learner.apply(torch.ones(bench.learner.size), 1.0, 1.0)
    bench.manifests.append((await bench.publisher.stage(0, 2, bench.manifests[-1])).digest)
    bench.weights.append(bench.learner.copied_weights())


async def checkpoint(bench: Trained) -> None:
    await bench.checkpoints.begin(0, 2, VersionIdentity(bench.manifests[2]), {"version": 2})
    await bench.checkpoints.settled(required=True)
    bench.names.append(bench.checkpoints.name)


@pytest.mark.parametrize("harm", [flip, delete], ids=lambda harm: harm.__name__)
def test_what_is_damaged_before_it_is_read_is_written_again(tmp_path: Path, harm: Harm) -> None:
    async def story(bench: Trained) -> None:
        await staged(bench)
        for path in await bench.chunks(2):
            harm(path, b"of another")
        await bench.store.restart_store()  # which remembers manifests
        await checkpoint(bench)
        chunks = await bench.chunks(2)
        assert await bench.store.stored(bench.manifests[2])
        for path in chunks:
            path.unlink()
        await bench.store.restart_store()
        assert await bench.usable() == 2, "the checkpoint's own model is that version"

    trained(tmp_path, story)


def test_weights_that_have_changed_are_not_taken_for_the_version(tmp_path: Path) -> None:
    async def story(bench: Trained) -> None:
        await staged(bench)
        for path in await bench.chunks(2):
            path.unlink()
        await bench.store.restart_store()
        bench.learner.load_weights(bench.weights[1])
        with pytest.raises((Damaged, NotFound)):
            await checkpoint(bench)
        assert bench.checkpoints.name == bench.names[-1], "the one before"

    trained(tmp_path, story)
