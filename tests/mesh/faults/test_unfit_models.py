"""Jobs with a model that no trainer can create, which fail with a reason."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.common.state import jobs
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.job import bundle, job_reader
from tests.mesh.elastic import JOB_FILE, RANK_MAIN, ElasticMesh

pytestmark = [pytest.mark.timeout(300), pytest.mark.group("elastic")]
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"model_type": "abacus"}, "unknown model architecture 'abacus'"),
    "incomplete": ({"num_attention_heads": None}, "num_attention_heads is missing"),
}


async def test_job_with_an_invalid_model_fails_with_the_reason() -> None:
    with tempfile.TemporaryDirectory(prefix="u") as made:  # short: it contains a unix socket
        elastic = ElasticMesh(Path(made))
        await elastic.open()
        try:
            for job, (change, why) in CHANGES.items():
                for ranks in (1, 2):
                    await assert_fails(elastic, f"{job}-{ranks}", ranks, change, why)
            if not torch.cuda.is_available():
                why = "the trainer cannot compute on a GPU: torch"
                await assert_fails(elastic, "no-gpu", 1, {}, why, device="cuda")
        finally:
            await elastic.close()


async def assert_fails(
    elastic: ElasticMesh, job: str, ranks: int, change: dict[str, Any], why: str, device: str = ""
) -> None:
    config, base = job_reader.load_config(JOB_FILE, [])
    run_dir = elastic.directory / job
    _, packed = bundle.pack_bundle(config, base, run_dir)
    document = json.loads(json.dumps(packed))
    changed = document["model"]["config"] | change
    document["model"]["config"] = {k: v for k, v in changed.items() if v is not None}
    await jobs.submit(elastic.state, job, document, str(run_dir), job)
    seat = Placement("g0", "g0.0", job, 1, core=True, ranks=ranks)
    elastic.run(f"trainer/{job}", RANK_MAIN, seat.to_args(), device=device)

    async def has_failed() -> str:
        row = await jobs.read_job(elastic.state, job)
        assert row is not None
        return row.error if row.phase == "failed" else ""

    assert why in await elastic.until(f"{job} fails", has_failed, within_s=90.0)
