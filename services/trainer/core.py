"""The core of a training gang: leases groups, has their bins computed, steps, stages, commits."""

from __future__ import annotations

import asyncio
from typing import Any

from common.actor import Actor, call
from common.api.engine import Engine
from common.api.hint import Look
from common.api.role import Drain, Drained
from common.api.trainer import BinLease, BinRequest, BinResult, BinTaken, Trainer
from common.api.weights import Checkpoint, Group, Weights
from common.blob import unpack
from common.bulk import BulkClient
from common.errors import BadMessage, MeshError, NotFound
from common.jobdata import JobData
from common.mesh import Mesh
from common.model.transfer import stage
from common.patience import patiently
from common.state import groups, jobs, registry, steps
from common.store import STORE, get
from services.trainer.batch import Batch, assemble
from services.trainer.batching import make_bins
from services.trainer.beginning import from_checkpoint, warm
from services.trainer.gradients import COMPUTE_S, Gradients
from services.trainer.learner import MODEL, BinStats, Learner
from services.trainer.optimizers import lr_factor

POLL_S = 0.03  # how often ready groups are looked for


class TrainerCore(Actor):
    """Owns parameters and optimizer; hybrids lend it gradients."""

    interface = Trainer

    def __init__(self, mesh: Mesh, data: JobData, gang: str, epoch: int, learner: Learner) -> None:
        self.mesh, self.data, self.gang, self.epoch = mesh, data, gang, epoch
        self.learner = learner
        self.bulk = BulkClient(mesh)
        self.ready = False
        self.steps_done, self.lineage, self.manifest = 0, 0, ""
        self.tokens = 0
        self.busy_s, self.wait_s = 0.0, 0.0
        self.warm_fraction = 0.0
        self.gradients = Gradients(mesh, learner, gang, data.config.training.bin_deadline_s)

    def stats(self) -> dict[str, Any]:
        return {
            "job": self.data.id,
            "epoch": self.epoch,
            "ready": self.ready,
            "gang": self.gang,
            "core": True,
            "step": self.steps_done,
            "tokens": self.tokens,
            "busy_s": self.busy_s,
            "wait_s": self.wait_s,
            "warm_start": self.warm_fraction,
        }

    # -- hybrids ---------------------------------------------------------------------------------

    @call(Trainer.lease_bin)
    async def lease_bin(self, request: BinRequest) -> BinLease:
        lease = await self.gradients.lease(request.gang, request.wait_s)
        return lease or BinLease(
            self.steps_done + 1, self.steps_done, self.mesh.incarnation, -1, "", {}
        )

    @call(Trainer.bin_done)
    def bin_done(self, result: BinResult) -> BinTaken:
        return BinTaken(self.gradients.done(result))

    @call(Trainer.drain)
    def drain(self, request: Drain) -> Drained:
        """A step that is cut off is repeated by the next core, from its own lease of the groups."""
        return Drained(0)

    # -- life ------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Puts the learner where the job stands; makes version 0 if there is none."""
        row = await self._row()
        if row.version < 0:
            if row.phase == "queued":
                await self._phase("warm_start")
            with self.mesh.loading():
                cached = await self._warm()
            await self._commit_initial(cached)
            row = await self._row()
        else:
            with self.mesh.loading():
                await from_checkpoint(
                    self.mesh, self.bulk, self.data, self.learner, row.checkpoint, row.manifest
                )
        self.steps_done, self.lineage, self.manifest = row.version, row.lineage, row.manifest
        self.warm_fraction = 1.0
        if row.phase in ("queued", "warm_start"):
            await self._phase("baseline")
        self.ready = True

    async def _row(self) -> jobs.JobRow:
        row = await patiently(self.mesh.clock, lambda: jobs.job(self.mesh.state, self.data.id))
        if row is None:
            raise NotFound(f"the job {self.data.id} is not in Redis any more")
        return row

    async def _phase(self, phase: str) -> None:
        await patiently(
            self.mesh.clock,
            lambda: jobs.set_phase(
                self.mesh.state, self.data.id, phase, self.mesh.token, self.mesh.name
            ),
        )

    async def _warm(self) -> bool:
        if not self.data.config.warm_start.demonstrations:
            return False
        total = max(1, self.data.config.warm_start.steps)

        def progress(step: int, loss: float) -> None:
            self.warm_fraction = step / total

        return await self.mesh.host.run_blocking(
            warm, self.data, self.learner, progress, deadline_s=COMPUTE_S
        )

    async def _commit_initial(self, cached: bool) -> None:
        lineage = 0
        weights, name = await self._stage(lineage, 0, {"version": 0, "warm_start_cached": cached})
        await patiently(
            self.mesh.clock,
            lambda: steps.commit_initial(
                self.mesh.state,
                self.data.id,
                self.mesh.name,
                self.mesh.token,
                lineage,
                weights,
                name,
            ),
        )

    async def train(self) -> None:
        """Steps until the budget is spent, or the job has ended."""
        row = await self._row()
        budget = self.data.config.budget.steps
        while self.steps_done < budget and row.phase not in ("failed", "stopped", "finished"):
            if row.phase != "training":
                await self.mesh.clock.sleep(POLL_S)
                row = await self._row()
                continue
            await self._step(self.steps_done + 1)
        while True:  # the role process stays until its gang is moved
            await self.mesh.clock.sleep(60.0)

    # -- a step ----------------------------------------------------------------------------------

    async def _step(self, step: int) -> None:
        clock = self.mesh.clock
        started = clock.monotonic()
        found = await self._groups(step)
        waited = clock.monotonic() - started
        began = clock.monotonic()
        batch = await self._batch(found, step)
        metrics: dict[str, Any] = batch.metrics()
        metrics |= await self._update(step, batch)
        busy = clock.monotonic() - began
        metrics |= {
            "step": step,
            "wait_s": waited,
            "train_s": busy,
            "wall": clock.wall(),
            "workers": dict(self.gradients.busy_s),
        }
        await self._commit(step, batch, metrics)
        self.busy_s += clock.monotonic() - began
        self.wait_s += waited
        self.tokens += batch.tokens

    async def _lease_groups(self, step: int) -> list[groups.GroupRow]:
        answer = await self._try_lease(step)
        if isinstance(answer, groups.Leased):
            return answer.groups
        with self.mesh.wait("ready groups", on=answer.on or "rollout/0"):
            while not isinstance(answer, groups.Leased):
                await self.mesh.clock.sleep(POLL_S)
                answer = await self._try_lease(step)
        return answer.groups

    async def _try_lease(self, step: int) -> groups.Leased | groups.Waiting:
        return await patiently(
            self.mesh.clock,
            lambda: groups.lease_groups(
                self.mesh.state, self.data.id, self.mesh.name, self.mesh.token, step
            ),
        )

    async def _groups(self, step: int) -> list[Group]:
        """The groups of a step with their bytes; one whose bytes are gone or garbled goes back."""
        while True:
            leased = await self._lease_groups(step)
            found = await asyncio.gather(*(self._group(row) for row in leased))
            poisoned = [row for row, group in zip(leased, found, strict=True) if group is None]
            for row in poisoned:
                await self._give_back(row)
            if not poisoned:
                return [group for group in found if group is not None]

    async def _give_back(self, row: groups.GroupRow) -> None:
        name, token = self.mesh.name, self.mesh.token
        operation = f"poisoned-{row.group}"
        await patiently(
            self.mesh.clock,
            lambda: groups.group_requeued(
                self.mesh.state, self.data.id, name, token, row.group, "poisoned", operation
            ),
        )

    async def _batch(self, found: list[Group], step: int) -> Batch:
        return await self.mesh.host.run_blocking(
            assemble, found, step - 1, self.data.config, deadline_s=COMPUTE_S
        )

    async def _group(self, row: groups.GroupRow) -> Group | None:
        try:
            content = await get(self.mesh, self.bulk, row.digest, f"group {row.group}")
            return unpack(Group, content)
        except (NotFound, BadMessage) as error:
            self.mesh.telemetry.log.error("group", group=row.group, error=str(error))
            return None

    async def _update(self, step: int, batch: Batch) -> dict[str, Any]:
        """The optimizer step of a batch; a batch with nothing to learn from changes nothing."""
        self.gradients.busy_s = {}
        if not batch.sequences:
            return update_metrics(0, 0.0, BinStats())
        run = self.mesh.host.run_blocking
        config = self.data.config
        bins = await run(
            make_bins, batch.sequences, config.training.bin_tokens, step - 1, deadline_s=COMPUTE_S
        )
        gradient, stats = await self.gradients.total(step, bins, self.manifest)
        factor = lr_factor(step - 1, config.budget.steps, config.optimizer)
        norm = await run(self.learner.apply, gradient, stats.tokens, factor, deadline_s=COMPUTE_S)
        return update_metrics(len(bins), norm, stats)

    # -- staging and the commit ------------------------------------------------------------------

    async def _stage(self, lineage: int, version: int, account: dict[str, Any]) -> tuple[str, str]:
        """Weights and optimizer made durable under a checkpoint; (weights' manifest, its name)."""
        state = await self.mesh.host.run_blocking(self.learner.state, deadline_s=COMPUTE_S)
        weights = {
            key.removeprefix(MODEL): value for key, value in state.items() if key.startswith(MODEL)
        }
        rest = {key: value for key, value in state.items() if not key.startswith(MODEL)}
        staged, optimizer = await asyncio.gather(
            stage(self.mesh, self.bulk, self.data.id, lineage, version, weights),
            stage(self.mesh, self.bulk, self.data.id, lineage, version, rest),
        )
        request = Checkpoint(
            job=self.data.id,
            lineage=lineage,
            step=version,
            weights=staged,
            optimizer=optimizer,
            account=account,
        )
        store = self.mesh.ref(STORE)
        saved = await patiently(self.mesh.clock, lambda: store.call(Weights.save, request))
        return staged, saved.name

    async def _commit(self, step: int, batch: Batch, metrics: dict[str, Any]) -> None:
        account = await patiently(
            self.mesh.clock,
            lambda: steps.checkpoint_state(
                self.mesh.state, self.data.id, batch.groups, batch.filtered
            ),
        )
        weights, checkpoint = await self._stage(self.lineage, step, account)
        record = {"bins": metrics["bins"], "seed": self.data.config.seed}
        committed = await patiently(
            self.mesh.clock,
            lambda: steps.commit_step(
                self.mesh.state,
                self.data.id,
                self.mesh.name,
                self.mesh.token,
                self.lineage,
                step,
                batch.groups,
                batch.filtered,
                weights,
                checkpoint,
                metrics,
                record,
                covered=step,
            ),
        )
        self.steps_done, self.manifest = committed.version, weights
        await self._tell_engines()

    async def _tell_engines(self) -> None:
        """A hint that there is a new version; an engine that misses it looks by itself."""
        try:
            for entry in await registry.entries(self.mesh.state, "engine"):
                if entry.alive:
                    await self.mesh.ref(entry.name).cast(Engine.look, Look("version"))
        except MeshError as error:
            self.mesh.telemetry.log.warning("hint", error=str(error))


def update_metrics(bins: int, norm: float, stats: BinStats) -> dict[str, Any]:
    """What a step's metrics say of its gradient; sums become means over the trained tokens."""
    tokens = max(1, stats.tokens)
    return {
        "bins": bins,
        "grad_norm": norm,
        "loss": stats.loss_sum / tokens,
        "entropy": stats.entropy_sum / tokens,
        "clipped": stats.clipped / tokens,
        "kl": stats.kl_sum / tokens,
        "logprob_gap": stats.gap_max if stats.fresh_tokens else None,
        "logprob_gap_mean": stats.gap_sum / max(1, stats.fresh_tokens),
        "fresh_tokens": stats.fresh_tokens,
        "model_tokens": stats.tokens,
    }
