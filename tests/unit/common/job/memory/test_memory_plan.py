"""Estimated memory of a job's processes, against tensors and measured peaks."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor

from loadtests.memory.cases import CASES
from meshrl.common.base.errors import ConfigError
from meshrl.common.generation.backends.graphs import GraphCompute
from meshrl.common.generation.backends.native import HEAD_WIDTHS
from meshrl.common.generation.backends.native import SCORE_CHUNK_TOKENS as NATIVE_CHUNK
from meshrl.common.generation.builtin import engine_builder
from meshrl.common.job.config import (
    AlgorithmConfig,
    JobConfig,
    LoraConfig,
    OptimizerConfig,
    TrainingConfig,
    ZebraConfig,
)
from meshrl.common.job.memory import activations, generation, training
from meshrl.common.job.memory.cache_blocks import BLOCK_TOKENS, count_least_blocks
from meshrl.common.job.memory.model_sizes import ModelSizes
from meshrl.common.job.memory.plan import JobModels, RoleCounts, plan_memory
from meshrl.common.job.memory.process_memory import TOLERANCE, ProcessMemory, describe_bytes
from meshrl.common.job.memory.remedies import (
    MemoryNeed,
    Remedy,
    describe_remedies,
    find_remedies,
)
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.network.moe import is_expert_matrix
from meshrl.common.state.pool.demand.role_memory import RoleMemory, derive_role_memory
from meshrl.kernels.ops import linear_logprob
from meshrl.services.trainer.learner import optimizers
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.sharding import fsdp

DENSE = ModelConfig("qwen3", 64, 64, 6, 4, 2, 16, 128, qk_norm=True, tie_embeddings=True)
MIXTURE = replace(
    DENSE,
    architecture="qwen2_moe",
    qk_norm=False,
    attention_bias=True,
    tie_embeddings=False,
    num_experts=4,
    num_experts_per_token=2,
    expert_ffn_size=32,
    shared_expert_ffn_size=48,
    dense_layers=(0,),
)
QWEN3_8B = ModelConfig("qwen3", 151_936, 4096, 36, 32, 8, 128, 12_288, qk_norm=True)
GIB = 1 << 30


def count_bytes(tensors: dict[str, Tensor], prefix: str) -> int:
    return sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(prefix))


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_estimates_are_within_their_tolerance_of_measured_peaks(name: str) -> None:
    found = CASES[name]()
    assert abs(found["ratio"] - 1) <= TOLERANCE, found


@pytest.mark.parametrize("shape", [DENSE, MIXTURE])
def test_sizes_are_those_of_the_model(shape: ModelConfig) -> None:
    with torch.device("meta"):
        parameters = dict(Decoder(shape).named_parameters())
    sizes = ModelSizes(shape)
    assert sizes.total == sum(parameter.numel() for parameter in parameters.values())
    experts = [p.numel() for name, p in parameters.items() if is_expert_matrix(name)]
    assert sizes.experts == sum(experts)
    updated = [
        tuple(p.shape)
        for name, p in parameters.items()
        if p.dim() > 1 and name.rpartition(".")[2] not in optimizers.MUON_EXCLUDED
    ]
    assert sorted(sizes.matrices.elements()) == sorted(updated)
    assert sizes.largest_matrix == max(map(prod, updated))


def test_constants_are_those_of_the_programs() -> None:
    assert activations.MAX_LOGITS == linear_logprob.MAX_LOGITS_PER_CHUNK
    assert activations.MIN_CHUNK_IDS == linear_logprob.MIN_CHUNK_IDS
    assert training.MAX_UNSHARDED_BYTES == fsdp.MAX_UNSHARDED_BYTES
    assert training.MAX_UPDATE_NUMBERS == optimizers.MAX_BATCH_NUMBERS
    assert generation.NATIVE_HEAD_WIDTHS == HEAD_WIDTHS
    assert generation.SCORE_CHUNK_TOKENS == NATIVE_CHUNK


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": OptimizerConfig(muon_lr=0.0)},
        {"optimizer": OptimizerConfig(muon_lr=0.003)},
        {"lora": LoraConfig(rank=4), "training": TrainingConfig(dtype="bfloat16")},
    ],
)
def test_state_of_a_core_is_that_of_its_learner(algorithm: str, changes: dict[str, object]) -> None:
    config = replace(JobConfig(algorithm=AlgorithmConfig(name=algorithm)), **changes)  # type: ignore[arg-type]
    dtype = getattr(torch, config.training.dtype)
    learner = Learner(Decoder(DENSE), config.optimizer, config.algorithm, dtype=dtype)
    if config.lora.rank:
        learner.add_adapters(config.lora, 0)
    [estimate] = training.plan_core(config, DENSE)
    tables = 4 * ModelSizes(DENSE).rotary_table * (2 if algorithm == "ppo" else 1)
    held = learner.get_tensors()
    assert estimate.masters - tables == pytest.approx(count_bytes(held, "model."), rel=0.001)
    assert estimate.moments == pytest.approx(count_bytes(held, "optimizer."), rel=0.001)
    copy = count_bytes(learner.get_derived_tensors(), "")
    assert estimate.weights - (tables // 2 if copy else 0) == pytest.approx(copy, rel=0.001)
    assert estimate.gradients == pytest.approx(8 * learner.parameter_count, rel=0.001)
    hybrid = training.plan_hybrid(config, DENSE, 1)
    learner.drop_moments()
    assert hybrid.masters + hybrid.weights == pytest.approx(
        learner.size_bytes + tables * (1.5 if copy else 1), rel=0.001
    )


def test_bin_has_at_most_the_tokens_of_an_update() -> None:
    algorithm = AlgorithmConfig(group_size=4, groups_per_step=2)
    many = JobConfig(algorithm=algorithm, training=TrainingConfig(bin_tokens=1 << 20))
    exact = replace(many, training=TrainingConfig(bin_tokens=8 * many.rollout.max_tokens))
    assert training.plan_core(many, DENSE) == training.plan_core(exact, DENSE)


def test_blocks_and_ranks_add_sums_of_gradients() -> None:
    def count(**changes: int) -> tuple[int, int]:
        config = JobConfig(training=TrainingConfig(**changes))  # type: ignore[arg-type]
        [core] = training.plan_core(config, DENSE)
        hybrid = training.plan_hybrid(config, DENSE, 1)
        size = 4 * DENSE.num_parameters
        return round(core.gradients * config.training.ranks / size), hybrid.gradients // size

    assert count(block_rounds=1) == (2, 1)
    assert count(block_rounds=4) == (3, 2)
    assert count(block_rounds=100) == (2, 2), "the update is one block"
    assert count(block_rounds=1, ranks=2) == (2, 2)
    assert count(block_rounds=0, ranks=2) == (2, 3)


def test_only_a_large_model_is_gathered_by_layer() -> None:
    config = JobConfig(training=TrainingConfig(ranks=8, dtype="bfloat16"))
    [small], [large] = training.plan_core(config, DENSE), training.plan_core(config, QWEN3_8B)
    assert small.weights == 2 * DENSE.num_parameters
    sizes = ModelSizes(QWEN3_8B)
    assert large.weights == 2 * (sizes.embeddings + 2 * sizes.largest_layer)
    assert large.masters == pytest.approx(4 * sizes.total / 8, rel=0.02)


def test_expert_split_divides_the_parameters() -> None:
    zebra = ZebraConfig(attention=1, hosted=[1])
    config = JobConfig(training=TrainingConfig(ranks=3, zebra=zebra))
    attention, expert = training.plan_core(config, MIXTURE)
    assert (attention.count, expert.count) == (1, 2)
    tables = 4 * ModelSizes(MIXTURE).rotary_table
    masters = attention.masters + 2 * expert.masters - 3 * tables
    assert masters == pytest.approx(4 * MIXTURE.num_parameters, rel=0.001)
    experts = 4 * ModelSizes(MIXTURE).experts
    assert expert.masters - tables == experts * 3 // 4 // 2


def test_processes_on_one_worker_are_added() -> None:
    config = JobConfig.from_document({"models": {"reference": {"path": "initial"}}})
    models = JobModels(DENSE, {"reference": DENSE})
    shared = plan_memory(config, models, RoleCounts(shares_core_worker=True))
    apart = plan_memory(config, models, RoleCounts(hybrids=1))
    names = [tuple(one.process for one in worker) for worker in shared.by_worker]
    assert names == [("core", "engine"), ("frozen reference",)]
    names = [tuple(one.process for one in worker) for worker in apart.by_worker]
    assert names == [("core",), ("engine",), ("hybrid",), ("frozen reference",)]


def test_cache_is_limited_by_its_key() -> None:
    for value, tokens in (("auto", 64 * 320), ("32 MiB", 10_922), (0.5, 64 * 320)):
        config = JobConfig.from_document({"rollout": {"kv_memory": value}})
        engine = generation.plan_engine(config, DENSE, 1, 1)
        token_bytes = generation.count_cache_bytes(DENSE, 4, 1, is_native=True)
        assert engine.cache == tokens * token_bytes
        least_blocks = count_least_blocks(config.rollout.max_tokens)
        assert engine.least_cache == least_blocks * BLOCK_TOKENS * token_bytes


def test_least_bytes_have_one_sequence_of_cache_and_the_tolerance() -> None:
    found = ProcessMemory(process="engine", weights=1000, activations=100, cache=90, least_cache=20)
    assert (found.total_bytes, found.least_bytes) == (1190, 1105)
    assert replace(found, reserved=90).least_bytes == 1110, "an engine refuses to start without"


def test_functions_of_a_core_compute_with_different_bytes() -> None:
    core = ProcessMemory(process="core", masters=100, moments=200, gradients=100, activations=200)
    assert core.count_function_bytes(50) == 450
    assert core.count_function_bytes(200) == core.least_bytes == 570
    for ranks in (1, 2):
        [rank] = training.plan_core(JobConfig.from_document({"training": {"ranks": ranks}}), DENSE)
        assert 0 < rank.optim_step < rank.forward_backward == rank.activations


def test_engine_of_a_gpu_reserves_attention_scores() -> None:
    rollout = {"max_tokens": 32_768, "slots": 64, "dtype": "bfloat16"}
    for engine, scores in (("torch", 32 * 32_768 * 512 * 8), ("sglang", 0)):
        config = JobConfig.from_document(
            {"mesh": {"device": "cuda"}, "rollout": rollout | {"engine": engine}}
        )
        found = generation.plan_engine(config, QWEN3_8B, 1, 1)
        assert (found.activations > 4 * 10**9) == bool(scores) and found.activations > scores
        assert found.reserved == (found.activations if scores else 0)
    config = JobConfig.from_document(
        {
            "mesh": {"device": "cuda"},
            "models": {"reference": {"path": "initial", "max_tokens": 32_768}},
        }
    )
    frozen = generation.plan_frozen_model(config, "reference", QWEN3_8B)
    assert frozen.activations >= frozen.reserved > 4 * 10**9


def test_engine_refuses_only_a_gpu_that_the_plan_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = {"max_tokens": 128, "slots": 4}
    config = JobConfig.from_document({"mesh": {"device": "cuda"}, "rollout": rollout})
    needed = generation.plan_engine(config, DENSE, 1, 1)
    free_bytes = needed.least_bytes - needed.context - 4 * ModelSizes(DENSE).rotary_table
    place = engine_builder.EngineBackend("graphs", torch.device("cuda"))
    monkeypatch.setattr(engine_builder, "choose_gpu_backend", lambda: place)
    monkeypatch.setattr(GraphCompute, "attach_block_table", lambda *_: None)
    engine = engine_builder.build_engine(
        DENSE, 4, 128, device="cuda", read_free_bytes=lambda _: free_bytes
    )
    assert engine._plan_cache().size_bytes == needed.least_cache
    free_bytes -= 1
    with pytest.raises(ConfigError, match="one sequence of 128 tokens"):
        engine._plan_cache()


# -- admission -------------------------------------------------------------------------------------


def test_admission_uses_the_same_bytes() -> None:
    document = JobConfig.from_document({"rollout": {"tensor_parallel": [1, 2]}}).to_document()
    assert derive_role_memory(document) == RoleMemory(), "the model is unknown"
    document["bundle"] = {"models": {"trained": QWEN3_8B.to_hf()}}
    found = derive_role_memory(document, "cuda")
    config = JobConfig.from_document(
        {"rollout": {"tensor_parallel": [1, 2]}, "mesh": {"device": "cuda"}}
    )
    [core] = training.plan_core(config, QWEN3_8B)
    engines = {n: generation.plan_engine(config, QWEN3_8B, 1, n).least_bytes for n in (1, 2)}
    assert found == RoleMemory(
        core=core.least_bytes,
        core_pass=core.least_bytes,
        core_update=core.least_bytes - round(0.85 * core.activations) + core.optim_step,
        core_moments=core.moments,
        core_state=core.masters + core.moments,
        hybrid=training.plan_hybrid(config, QWEN3_8B, 1).least_bytes,
        engines=engines,
    )
    assert derive_role_memory(document).core < found.core, "a CPU has no context"
    assert core.gradients + core.moments < found.core_update < found.core
    warm = document | {"warm_start": document["warm_start"] | {"demonstrations": "a:b"}}
    assert derive_role_memory(warm, "cuda").core == found.core
    assert not derive_role_memory(warm, "cuda").core_update, "it trains beside the moments"


@pytest.mark.parametrize(
    "models",
    [
        {"trained": {"model_type": "none"}},
        {"trained": 3},
        [],
        {"trained": {"hidden_size": "x"}},
        {"trained": DENSE.to_hf() | {"num_attention_heads": 0}},
        {"trained": DENSE.to_hf() | {"num_hidden_layers": 0}},
        {"trained": DENSE.to_hf() | {"rope_scaling": 1}},
    ],
)
def test_unreadable_descriptions_of_models_leave_the_bytes_unknown(models: object) -> None:
    document = JobConfig().to_document() | {"bundle": {"models": models}}
    assert derive_role_memory(document) == RoleMemory()


def test_descriptions_of_other_users_are_bounded() -> None:
    model = DENSE.to_hf() | {"num_hidden_layers": 1_000_000}
    document = JobConfig().to_document() | {"bundle": {"models": {"trained": model}}}
    assert derive_role_memory(document) == RoleMemory()


# -- remedies --------------------------------------------------------------------------------------


def test_each_key_that_suffices_is_named_with_its_smallest_step() -> None:
    def measure(config: JobConfig) -> MemoryNeed:
        needed = config.training.bin_tokens // config.training.ranks
        return MemoryNeed(needed, needed <= 1000)

    found = find_remedies(JobConfig(), measure)
    assert found == [
        Remedy({"training.bin_tokens": 640}, 640),
        Remedy({"training.ranks": 4}, 640),
    ]
    assert describe_remedies(found) == (
        "Set training.bin_tokens = 640 (640 bytes), or training.ranks = 4 (640 bytes)"
    )


def test_keys_are_combined_if_none_suffices_alone() -> None:
    def measure(config: JobConfig) -> MemoryNeed:
        needed = 4 if config.training.dtype == "float32" else 2
        needed += 4 if config.rollout.dtype == "float32" else 2
        return MemoryNeed(needed, needed <= 4)

    [found] = find_remedies(JobConfig(), measure)
    assert found.changes == {"rollout.dtype": "bfloat16", "training.dtype": "bfloat16"}
    assert "and training.dtype" in describe_remedies([found])
    assert find_remedies(JobConfig(), lambda _: MemoryNeed(5, False)) == []
    assert describe_remedies([]).startswith("No key suffices")


def test_sizes_are_described_in_their_unit() -> None:
    sizes = [describe_bytes(size) for size in (5, 3 << 20, 2.5 * GIB)]
    assert sizes == ["5 bytes", "3.0 MiB", "2.5 GiB"]
