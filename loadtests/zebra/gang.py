"""Ranks of an emulated gang.

Usage:

    python -m loadtests.zebra.gang DIRECTORY SETTING ROUNDS

SETTING is a JSON object, the fields of `Setting`. The ranks are forks of one process, without a
mesh. Each computes steps of all arms, in rotating order. Each prints the start and end of its
steps, its computing time, and the transfers of its lanes.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist

from loadtests.measuring.processes import forked
from loadtests.measuring.rounds import rotated
from meshrl.common.api.ranks import Rendezvous
from meshrl.common.hardware.zebra.core_shapes import compute_costs
from meshrl.common.hardware.zebra.costs import MicroBatchCosts
from meshrl.common.hardware.zebra.declared_profiles import build_declared_profile
from meshrl.common.hardware.zebra.expert_hosting import (
    ExpertHosting,
    HostingBounds,
    RankCounts,
    optimize_hosting,
)
from meshrl.common.hardware.zebra.micro_batches import pack_micro_batches
from meshrl.common.hardware.zebra.profile import AcceleratorCosts, MixtureProfile
from meshrl.common.hardware.zebra.timeline import Timeline, build_timeline, compute_serial_s
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.initial_parameters import RandomParameters
from meshrl.common.model.network.decoder import Decoder
from meshrl.services.trainer.bins.division import ZebraDivision
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.learner.learner import LearnerSettings
from meshrl.services.trainer.ranks.rank import join_group
from meshrl.services.trainer.sharding.learners import RankContext
from meshrl.services.trainer.zebra.zebra_emulation import ZebraEmulation
from meshrl.services.trainer.zebra.zebra_learner import ZebraLearner
from meshrl.sim.zebra.paper_setups import MODELS

DEADLINE_S = 120.0
VOCABULARY, WIDTH = 64, 32
FAST, SLOW = "A40", "V100"
COUNT = 2  # of either kind
RANKS = 2 * COUNT
MICROS = 4  # micro-batches of an attention rank in a step
TOKENS = 96  # of a real micro-batch: as many rows for each expert, as it is routed
LINK_BYTES_PER_S = 12.5e9  # 100 Gb/s
FREE_BYTES_PER_S = 1e30
WORTH = 1.1  # that experts on attention ranks are to bring by the list schedule, to be an arm
LONGEST_S = 0.16  # that the longest task takes here


@dataclass(frozen=True)
class Setting:
    """A model of the source at one length of sequences."""

    model: str
    length: int
    tokens: int = TOKENS  # of a real micro-batch
    longest_s: float = LONGEST_S  # that the longest task takes here

    @cached_property
    def profile(self) -> MixtureProfile:
        shape = MODELS[self.model].shape
        return build_declared_profile(shape, FAST, SLOW, link_bytes_per_s=LINK_BYTES_PER_S)

    @cached_property
    def costs(self) -> tuple[MicroBatchCosts, float]:
        """Return the costs of a micro-batch of one sequence, in declared seconds: see
        `costs_of`.
        """
        profile = self.profile
        assert profile.fast.attention is not None
        batches = pack_micro_batches(
            {self.length: COUNT * MICROS}, COUNT * MICROS, profile.fast.attention
        )
        assert batches is not None
        return compute_costs(profile, RankCounts(COUNT, COUNT), batches)

    @cached_property
    def hosting(self) -> ExpertHosting:
        """Return the experts that Asym-EA places on attention ranks; memory is not a bound here."""
        layers, experts, ranks = self.profile.layers, self.profile.experts, RankCounts(COUNT, COUNT)
        bounds = HostingBounds(0, layers * experts)
        return optimize_hosting(layers, MICROS, experts, ranks, *self.costs, bounds)

    @property
    def scale(self) -> float:
        """Real seconds of a declared one."""
        costs, _ = self.costs
        return self.longest_s / max(costs.attention_s, costs.experts_s) / costs.backward_factor

    def simulated(self, asymmetric: bool) -> Timeline:
        """Return a step of the gang by the list schedule, in declared seconds."""
        costs, elsewhere = self.costs
        if asymmetric:
            costs = self.hosting.apply_to_costs(costs, elsewhere)
        return build_timeline(self.profile.layers, MICROS, costs)

    @property
    def serial_s(self) -> float:
        """The same without overlap, in declared seconds."""
        return compute_serial_s(self.profile.layers, MICROS, self.costs[0])


@dataclass(frozen=True)
class Arm:
    """A way to compute a step of COUNT * MICROS sequences on four ranks."""

    name: str
    division: ZebraDivision
    rounds: int  # that make a step
    links: bool = True  # whether transfers take time

    def profile(self, setting: Setting) -> MixtureProfile:
        profile = setting.profile
        if self.links:
            return profile
        return replace(profile, link_bytes_per_s=FREE_BYTES_PER_S, link_latency_s=0.0)

    def kind(self, profile: MixtureProfile, rank: int) -> AcceleratorCosts:
        return profile.fast if rank < COUNT else profile.slow


def arms(setting: Setting) -> list[Arm]:
    """Return the arms of a setting; hosting is no arm where it would gain little."""
    layers, experts = setting.profile.layers, setting.profile.experts
    none, ranks = (0,) * layers, 2 * COUNT
    found = [
        Arm("zebra", ZebraDivision(COUNT, COUNT, MICROS, none), 1),
        Arm("free", ZebraDivision(COUNT, COUNT, MICROS, none), 1, links=False),
        Arm("distep", ZebraDivision(COUNT, COUNT, 1, none), MICROS),
        Arm("ep", ZebraDivision(ranks, 0, 1, (experts // ranks,) * layers), MICROS // 2),
    ]
    if setting.simulated(False).makespan_s > WORTH * setting.simulated(True).makespan_s:
        found.append(
            Arm(
                "asymmetric",
                ZebraDivision(COUNT, COUNT, MICROS, setting.hosting.on_attention_ranks),
                1,
            )
        )
    return found


def config(setting: Setting) -> ModelConfig:
    """Return the real model: as many layers and experts as declared, and little to compute."""
    profile = setting.profile
    return ModelConfig.from_hf(
        {
            "model_type": "qwen3_moe",
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": WIDTH,
            "moe_intermediate_size": 16,
            "num_hidden_layers": profile.layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": profile.experts,
            "num_experts_per_tok": profile.experts_per_token,
            "norm_topk_prob": True,
            "max_position_embeddings": setting.tokens,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        }
    )


def bin_of(setting: Setting, number: int) -> Bin:
    """Return one sequence whose rows are spread evenly over all experts, as in the declared
    costs.
    """
    random, count = np.random.default_rng(number), setting.tokens
    profile = setting.profile
    k = profile.experts_per_token
    tokens = random.integers(0, VOCABULARY, count).astype(np.int32)
    each = np.arange(count) % (profile.experts // k)
    shape = profile.layers, k
    columns = [random.permutation(each) for _ in range(profile.layers * k)]
    chosen = np.stack(columns, 1).reshape(count, *shape) * k + np.arange(k)
    return Bin(
        tokens=tokens,
        targets=np.roll(tokens, -1),
        positions=np.arange(count, dtype=np.int32),
        cu_seqlens=np.array([0, count], np.int32),
        loss_mask=np.ones(count, np.bool_),
        fresh_mask=np.ones(count, np.bool_),
        behaviour_logprobs=np.full(count, -np.log(VOCABULARY), np.float32),
        advantages=np.ones(count, np.float32),
        weight=np.ones(count, np.float32),
        expert_ids=chosen.astype(np.int16),
    )


def make_learner(setting: Setting, arm: Arm, rank: int, group: Any) -> ZebraLearner:
    shape = config(setting)
    with torch.device("meta"):
        model = Decoder(shape)
    profile = arm.profile(setting).scale_time(setting.scale)
    pace = ZebraEmulation(profile, arm.kind(profile, rank), setting.length / setting.tokens)
    settings = LearnerSettings(OptimizerConfig(), AlgorithmConfig())
    place = RankContext(group, RandomParameters(shape, 0), DEADLINE_S)
    return ZebraLearner(model, settings, place, arm.division, True, pace)


def step(setting: Setting, arm: Arm, learner: ZebraLearner, rank: int) -> dict[str, Any]:
    micros = arm.division.micro_batches if learner.has_attention else 0
    spans: list[tuple[float, float]] = []
    moved: list[tuple[float, float]] = []
    own = [bin_of(setting, rank * 100 + i) for i in range(arm.rounds * micros)]
    dist.barrier()
    began_s = time.monotonic()
    for number in range(arm.rounds):
        learner.compute_local_gradient(own[number * micros : (number + 1) * micros])
        spans += [(span.start_s, span.end_s) for span in learner.zebra_round.spans]
        moved += learner.zebra_round.transfers
    dist.barrier()
    return {
        "arm": arm.name,
        "step_s": time.monotonic() - began_s,
        "spans": [(a - began_s, b - began_s) for a, b in spans],
        "transfers": [(a - began_s, b - began_s) for a, b in moved],
    }


def run(directory: Path, setting: Setting, rounds: int, rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    meeting = Rendezvous(1, str(directory / "meeting"), DEADLINE_S, form_timeout_s=DEADLINE_S)
    group = join_group(meeting, rank, RANKS, "cpu")
    chosen = arms(setting)
    learners = {arm.name: make_learner(setting, arm, rank, group) for arm in chosen}
    for arm in chosen:
        step(setting, arm, learners[arm.name], rank)  # whatever is done once
    paces = [learner.emulation for learner in learners.values() if learner.emulation is not None]
    before = sum(p.emulated_steps for p in paces), sum(p.late_steps for p in paces)
    cpu_s, began_s = time.process_time(), time.monotonic()
    found = []
    for number in range(rounds):
        for arm in rotated(chosen, number):
            found.append(step(setting, arm, learners[arm.name], rank) | {"round": number})
    return {
        "steps": found,
        "cores": (time.process_time() - cpu_s) / (time.monotonic() - began_s),
        "paced": sum(pace.emulated_steps for pace in paces) - before[0],
        "late": sum(pace.late_steps for pace in paces) - before[1],
    }


if __name__ == "__main__":
    directory, text, rounds = sys.argv[1:]
    setting = Setting(**json.loads(text))
    found = forked(RANKS, lambda rank: run(Path(directory), setting, int(rounds), rank))
    print(json.dumps(found))
