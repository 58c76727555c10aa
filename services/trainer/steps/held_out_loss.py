"""Loss of a supervised job on its held-out rows, under the weights of a new version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from meshrl.common.api.ranks import COMPUTE_TIMEOUT_S
from meshrl.common.api.rollout import HeldOutRequest, HeldOutRows, Rollout
from meshrl.common.job.config import JobConfig
from meshrl.common.job.evaluation_plan import LOSS_METRIC, is_loss_due
from meshrl.common.mesh.runtime.mesh import Mesh
from meshrl.common.mesh.runtime.retry_policy import retry
from meshrl.common.state.pool.workers.process_names import shard_name
from meshrl.services.trainer.bins.packing import UNKNOWN, Bin, TrainingSequence, make_bins
from meshrl.services.trainer.gang.gang_compute import GangCompute

ROWS_PER_CALL = 16  # limits the time and the bytes of an answer
EVALUATING = "evaluating"  # phase of the core
FetchRows = Callable[[HeldOutRequest], Awaitable[HeldOutRows]]


class HeldOutLoss:
    """Evaluation of versions by their mean loss per learned token; rows are encoded once."""

    def __init__(
        self, mesh: Mesh, config: JobConfig, compute: GangCompute, fetch_rows: FetchRows
    ) -> None:
        self._mesh, self._config, self._compute = mesh, config, compute
        self._fetch_rows = fetch_rows
        self._bins: list[Bin] | None = None

    def is_due(self, step: int) -> bool:
        return is_loss_due(self._config, step)

    async def measure(self) -> dict[str, float]:
        """Return the metric of the present weights; empty without a row that has an answer."""
        if self._bins is None:
            self._bins = await self._build_bins()
        tokens = sum(bin.loss_token_count for bin in self._bins)
        if not tokens:
            return {}
        scores = await self._compute.score(self._bins, "logprobs")
        total = sum(float(logprobs.sum(dtype=np.float64)) for logprobs in scores)
        return {LOSS_METRIC: -total / tokens}

    async def _build_bins(self) -> list[Bin]:
        sequences: list[TrainingSequence] = []
        start = 0
        while start >= 0:
            part = await self._fetch_rows(HeldOutRequest(start, ROWS_PER_CALL))
            sequences += build_sequences(part)
            start = part.next_start
        return await self._mesh.host.run_blocking(
            make_bins,
            sequences,
            self._config.training.bin_tokens,
            deadline_s=COMPUTE_TIMEOUT_S,
        )


def make_row_fetcher(mesh: Mesh, job: str) -> FetchRows:
    """Return the function that fetches encoded rows from the job's first shard, with retries."""

    async def fetch_rows(request: HeldOutRequest) -> HeldOutRows:
        shard = mesh.ref(shard_name(job, 0))
        return await retry(mesh.clock, lambda: shard.call(Rollout.encode_held_out, request))

    return fetch_rows


def build_sequences(rows: HeldOutRows) -> list[TrainingSequence]:
    """Return the sequences of encoded rows."""
    ends = np.cumsum(rows.lengths)[:-1]
    parts = zip(np.split(rows.tokens, ends), np.split(rows.learned, ends), strict=True)
    return [
        TrainingSequence(
            tokens=np.array(tokens),
            logprobs=np.zeros(len(tokens), np.float32),
            loss_mask=np.array(learned),
            versions=np.full(len(tokens), UNKNOWN, np.int32),
        )
        for tokens, learned in parts
        if len(tokens)
    ]
