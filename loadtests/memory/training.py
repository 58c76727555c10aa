"""Peaks of training processes: bytes that PyTorch's allocator has handed out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # which FSDP imports in each process
from torch.distributed.device_mesh import DeviceMesh

from loadtests.measuring.processes import forked
from meshrl.common.api.ranks import Rendezvous
from meshrl.common.job.config import JobConfig
from meshrl.common.job.memory.training import plan_core
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.files.initial_parameters import RandomParameters, materialize_model
from meshrl.common.model.network.decoder import Decoder
from meshrl.services.trainer.bins.packing import Bin
from meshrl.services.trainer.learner.learner import Learner, LearnerSettings
from meshrl.services.trainer.models.forward import enable_activation_checkpointing
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.services.trainer.sharding import fsdp
from meshrl.services.trainer.sharding.learners import FsdpLearner, RankContext

Changes = Mapping[str, Mapping[str, object]]  # values of a job file by table

TOKENS, SEQUENCES = 1024, 4  # of a bin
ROUNDS = 2  # of the measured step, whose gradients are summed
MEET_S = 300.0
DENSE = ModelConfig(
    "qwen3", 8192, 512, 8, 8, 4, 64, 1536, qk_norm=True, tie_embeddings=True
)  # 29 million parameters
MIXTURE = replace(
    DENSE,
    architecture="qwen3_moe",
    num_layers=4,
    num_experts=8,
    num_experts_per_token=2,
    expert_ffn_size=256,
)  # 20 million parameters


def measure_peak(work: Callable[[], None]) -> int:
    """Return the most bytes that PyTorch's CPU allocator has handed out during `work`."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        work()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    every = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in every if e.name() == "[memory]")
    return int(np.cumsum([size for _, size in changes]).max())


def make_bin(config: JobConfig, shape: ModelConfig) -> Bin:
    """Return a full bin of random tokens, all of them trained."""
    random = np.random.default_rng(0)
    starts = np.linspace(0, TOKENS, SEQUENCES + 1).astype(np.int32)
    zeros, ones = np.zeros(TOKENS, np.float32), np.ones(TOKENS, np.float32)
    critic = {"returns": zeros, "values": zeros} if config.algorithm.name == "ppo" else {}
    return Bin(
        tokens=random.integers(0, shape.vocab_size, TOKENS).astype(np.int32),
        targets=random.integers(0, shape.vocab_size, TOKENS).astype(np.int32),
        positions=np.concatenate([np.arange(n) for n in np.diff(starts)]).astype(np.int32),
        cu_seqlens=starts,
        loss_mask=np.ones(TOKENS, np.bool_),
        fresh_mask=np.ones(TOKENS, np.bool_),
        behaviour_logprobs=zeros - 9,
        advantages=ones,
        weight=ones,
        extras=critic,
    )


def make_config(changes: Changes) -> JobConfig:
    tables: dict[str, dict[str, object]] = {
        "training": {"bin_tokens": TOKENS},
        "rollout": {"max_tokens": TOKENS // SEQUENCES},
    }
    for table, values in changes.items():
        tables[table] = {**tables.get(table, {}), **values}
    return JobConfig.from_document(tables)


def train_one_step(rank: Rank, config: JobConfig, shape: ModelConfig) -> None:
    assert rank.learner.size_bytes, "moments have memory from the first report of a core's size on"
    for index in range(ROUNDS):
        rank.compute_round(index, [make_bin(config, shape)])
    rank.apply_gradient(ROUNDS, float(ROUNDS * TOKENS * rank.ranks), 1.0)


def build_learner(config: JobConfig, shape: ModelConfig) -> Learner:
    with torch.device("meta"):
        model = Decoder(shape)
    if config.training.activation_checkpointing:
        enable_activation_checkpointing(model)
    model = materialize_model(model, RandomParameters(shape, 0), "cpu")
    dtype = getattr(torch, config.training.dtype)
    learner = Learner(model, config.optimizer, config.algorithm, dtype=dtype)
    if config.lora.rank:
        learner.add_adapters(config.lora, 0)
    return learner


def measure_core(shape: ModelConfig, changes: Changes, large: bool = False) -> dict[str, float]:
    """Return the estimated and the measured bytes of a core's rank, and their ratio.

    `large`: ranks gather one layer at a time, as of a model of over 2 GiB.
    """
    config = make_config(changes)
    limit = 0 if large else fsdp.MAX_UNSHARDED_BYTES
    ranks = config.training.ranks

    def run_rank(number: int, directory: Path) -> int:
        torch.set_num_threads(1)
        vars(fsdp)["MAX_UNSHARDED_BYTES"] = limit

        def work() -> None:
            if ranks == 1:
                train_one_step(Rank.for_single_rank(build_learner(config, shape)), config, shape)
                return

            def make(mesh: DeviceMesh) -> Learner:
                with torch.device("meta"):
                    model = Decoder(shape)
                if config.training.activation_checkpointing:
                    enable_activation_checkpointing(model)
                dtype = getattr(torch, config.training.dtype)
                settings = LearnerSettings(config.optimizer, config.algorithm, dtype=dtype)
                place = RankContext(mesh, RandomParameters(shape, 0), MEET_S)
                return FsdpLearner(model, settings, place, config.lora)

            rank = Rank(make, number, ranks, "cpu")
            rank.join(Rendezvous(1, str(directory / "rendezvous"), MEET_S, form_timeout_s=MEET_S))
            rank.create_model()
            train_one_step(rank, config, shape)
            rank.leave()

        return measure_peak(work)

    with tempfile.TemporaryDirectory() as scratch:
        measured = max(forked(ranks, lambda number: run_rank(number, Path(scratch))))
    [estimated] = plan_core(config, shape, limit)
    return compare(estimated.total_bytes, measured)


def compare(estimated: int, measured: int) -> dict[str, float]:
    return {
        "estimated": estimated,
        "measured": measured,
        "ratio": round(estimated / measured, 3),
    }
