"""Start of a job's training: warm start and its cache, first weights, time slices, progress."""

from __future__ import annotations

import asyncio
import tomllib
from collections import deque
from collections.abc import AsyncIterator, Generator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from meshrl.common.api.calls.interface import Interface
from meshrl.common.api.node import AcquireSlice, ReleaseSlice, TimeSlice, Worker
from meshrl.common.api.weights import TrajectoryGroup
from meshrl.common.base.clock import Clock, SystemClock
from meshrl.common.base.errors import ConfigError, CorruptData
from meshrl.common.base.random import Random
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.config import (
    AlgorithmConfig,
    LoraConfig,
    OptimizerConfig,
    TrainedModelConfig,
    WarmStartConfig,
)
from meshrl.common.job.constraints import AlgorithmName
from meshrl.common.mesh.instances.time_slices import SliceClient
from meshrl.common.mesh.process.host import SystemHost
from meshrl.common.mesh.runtime.calls.actor import Actor, call
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.tokens.tokenizer import Tokenizer, build_character_tokenizer
from meshrl.common.state.pool.workers.placement import Placement
from meshrl.services.trainer.bins.packing import Bin, make_bins
from meshrl.services.trainer.core.core import TrainerCore
from meshrl.services.trainer.core.first_version import SLICE_S
from meshrl.services.trainer.gang.gang_compute import GangCompute
from meshrl.services.trainer.initialization import warm_start as warm
from meshrl.services.trainer.initialization.initial_weights import (
    create_first_weights,
    create_learner,
    describe_model,
    load_demonstrations,
)
from meshrl.services.trainer.learner.learner import Learner
from meshrl.services.trainer.models import critic
from meshrl.services.trainer.ranks.rank import Rank
from meshrl.sim.virtual_loop import VirtualLoop, run_virtual
from tests.meshes import alone
from tests.stories import story_on
from tests.tokenizers import make_tokenizer
from tests.unit.trainer.steps.groups_under_test import group, job
from tests.unit.trainer.tiers.bench import Bench

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=16,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    ffn_size=24,
    tie_embeddings=True,
    max_positions=64,
)
CONFIG = WarmStartConfig(steps=20, batch=8, warmup_steps=2)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return build_character_tokenizer("_$?=0123456789", tmp_path / "tokenizer.json")


def echo(random: Random, progress: float) -> warm.Segments:
    """Return a task to repeat a digit three times."""
    digit = str(random.randrange(10))
    return [(f"?{digit}=", False), (digit * 3 + "$", True)]


def create_fresh_decoder(
    config: ModelConfig = MODEL, name: AlgorithmName = "grpo", dtype: torch.dtype = torch.float32
) -> Learner:
    model = Decoder(config)
    model.initialise(torch.Generator().manual_seed(0))
    return Learner(model, OptimizerConfig(), AlgorithmConfig(name), dtype=dtype)


def run(
    tokenizer: Tokenizer,
    demonstrate: warm.Demonstrate = echo,
    seed: int = 3,
    learner: Learner | None = None,
    **changes: Any,
) -> tuple[Learner, list[tuple[int, float]]]:
    learner = learner or create_fresh_decoder()
    losses: list[tuple[int, float]] = []
    limits: dict[str, Any] = {"held_out": set(), "max_tokens": 32} | changes
    steps = warm.run_steps(
        learner,
        demonstrate,
        tokenizer,
        CONFIG,
        warm.DemonstrationLimits(**limits),
        seed=seed,
        bin_tokens=256,
        progress=lambda step, loss: losses.append((step, loss)),
    )
    deque(steps, maxlen=0)
    return learner, losses


def test_model_learns_the_demonstrations(tokenizer: Tokenizer) -> None:
    learner, losses = run(tokenizer)
    assert [step for step, _ in losses] == list(range(1, 21))
    assert losses[-1][1] < losses[0][1] - 0.3
    assert learner.steps == 0


def test_weights_depend_only_on_the_seed(tokenizer: Tokenizer) -> None:
    first, second, other = (run(tokenizer, seed=seed)[0].get_weights() for seed in (3, 3, 4))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())


def training_prompts(tokenizer: Tokenizer) -> Bin:
    made = [
        warm.encode_segments([(f"?{digit}=", False), ("777$", True)], tokenizer)
        for digit in range(4)
    ]
    (bin,) = make_bins(made, 256)
    return bin


def test_bfloat16_passes_use_the_warm_weights_at_once(tokenizer: Tokenizer) -> None:
    learner, _ = run(tokenizer, learner=create_fresh_decoder(dtype=torch.bfloat16))
    other, bin = create_fresh_decoder(dtype=torch.bfloat16), training_prompts(tokenizer)
    cold = other.score(bin)
    other.load_weights(learner.get_weights())
    scores = learner.score(bin)
    assert (scores == other.score(bin)).all() and abs(scores - cold).max() > 0.3


def test_critic_starts_from_the_warm_weights(tokenizer: Tokenizer) -> None:
    learner, _ = run(tokenizer, learner=create_fresh_decoder(name="ppo"))
    weights = learner.get_weights()
    trunk = dict(critic.get_critic(learner.model).trunk.named_parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trunk.items())
    assert not learner.score(training_prompts(tokenizer), "values").any()


def test_warm_start_balances_the_experts(tokenizer: Tokenizer) -> None:
    sparse = replace(
        MODEL,
        architecture="qwen3_moe",
        qk_norm=True,
        num_experts=4,
        num_experts_per_token=1,
        expert_ffn_size=16,
    )
    bin = training_prompts(tokenizer)
    plain, cross_entropy = create_fresh_decoder(sparse, "sft").compute_gradient(bin)
    both, stats = create_fresh_decoder(
        replace(sparse, router_aux_loss_coef=0.1), "sft"
    ).compute_gradient(bin)
    assert stats == cross_entropy  # on supervised tokens, the reported loss is unchanged
    balanced = create_fresh_decoder(replace(sparse, router_aux_loss_coef=0.1))
    balanced_bin = training_prompts(tokenizer)
    balanced_bin.advantages[:] = 0.0
    alone, _ = balanced.compute_gradient(balanced_bin)
    assert alone.any()
    torch.testing.assert_close(both, plain + alone, rtol=1e-4, atol=1e-5)


def test_held_out_prompts_are_not_demonstrated(tokenizer: Tokenizer) -> None:
    training_prompts = []

    def record_prompt(random: Random, progress: float) -> warm.Segments:
        segments = echo(random, progress)
        training_prompts.append((segments[0][0], progress))
        return segments

    run(tokenizer, record_prompt, held_out={"?3="})
    used = [prompt for prompt, _ in training_prompts if prompt != "?3="]
    assert len(training_prompts) > len(used) == CONFIG.steps * CONFIG.batch
    assert training_prompts[0][1] == 0.0 and 0.9 < training_prompts[-1][1] < 1.0


def test_unusable_demonstrations_raise_a_typed_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"warm_start\.demonstrations"):
        run(tokenizer, max_tokens=4)


def test_segments_are_encoded_separately_and_only_model_segments_trained(
    tokenizer: Tokenizer,
) -> None:
    made = warm.encode_segments([("?12=", False), ("3$", True)], tokenizer)
    assert made.tokens.tolist() == [2, 5, 6, 3, 7, 1]
    assert made.loss_mask.tolist() == [False, False, False, False, True, True]


def test_learning_rate_warms_up_stays_constant_and_decays_to_zero() -> None:
    config = WarmStartConfig(steps=100, warmup_steps=20, decay=0.4)
    factors = [warm.compute_lr_factor(step, config) for step in range(100)]
    assert factors[0] == pytest.approx(0.05) and factors[19:61] == [1.0] * 42
    assert factors[80] == pytest.approx(0.5) and factors[-1] == pytest.approx(1 / 40)


def test_cache_returns_weights_only_for_an_equal_job(tokenizer: Tokenizer, tmp_path: Path) -> None:
    learner, _ = run(tokenizer)
    path = warm.build_cache_path(str(tmp_path), {"seed": 3, "steps": 12}, [b"def demonstrate"])
    assert warm.load_weights(path) is None
    warm.save_weights(path, learner.get_weights())
    again = warm.build_cache_path(str(tmp_path), {"steps": 12, "seed": 3}, [b"def demonstrate"])
    cached_weights = warm.load_weights(again)
    assert cached_weights is not None
    assert all(
        torch.equal(tensor, cached_weights[name]) for name, tensor in learner.get_weights().items()
    )
    others = [
        warm.build_cache_path(str(tmp_path), {"seed": 4, "steps": 12}, [b"def demonstrate"]),
        warm.build_cache_path(str(tmp_path), {"seed": 3, "steps": 12}, [b"def", b" demonstrate"]),
    ]
    assert len({again, *others}) == 3
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == [path.name]


@pytest.mark.parametrize("remaining_bytes", [0, 20, -40, None])
def test_corrupt_cache_is_ignored(
    tokenizer: Tokenizer, tmp_path: Path, remaining_bytes: int | None
) -> None:
    learner, _ = run(tokenizer)
    path = tmp_path / "kept.safetensors"
    warm.save_weights(path, learner.get_weights())
    content = bytearray(path.read_bytes())
    content[-9] ^= 1  # of a weight
    path.write_bytes(content[:remaining_bytes])
    with pytest.raises(CorruptData, match="a saved warm start"):
        warm.load_weights(path)


JOBS = Path(__file__).parents[3] / "mesh/jobs"


@pytest.fixture
def data(tmp_path: Path) -> JobData:
    described = tomllib.loads((JOBS / "digits.toml").read_text())["model"]["config"]
    config = replace(job("grpo"), model=TrainedModelConfig(config=described))
    make_tokenizer(tmp_path)
    return JobData("j", config, tmp_path, tmp_path)


def test_model_shape_is_computed_without_allocation(data: JobData) -> None:
    config, parameters = describe_model(data)
    learner = create_learner(data)
    assert (config, parameters) == (learner.model.config, learner.parameter_count)


def test_ranks_allocate_no_whole_model_without_a_warm_start(data: JobData) -> None:
    adapted = replace(data, config=replace(data.config, lora=LoraConfig(rank=2)))
    for one in (data, adapted):
        phases = create_first_weights(one, lambda step, loss: None, lambda error_info: None)
        with pytest.raises(StopIteration) as ended:
            next(phases)
        assert ended.value.value == (None, False)


@pytest.mark.parametrize(
    ("body", "expected_message"),
    [
        (
            "return 'a text'",
            "returned 'a text', which is not a demonstration (shows_0.py:1 in show())",
        ),
        ("return []", "returned [], which is not a demonstration (shows_1.py:1 in show())"),
        ("return [('1', 0), (2, 1)]", "is not a demonstration (shows_2.py:1 in show())"),
        ("\n    return {}['prompt']", "raised KeyError: 'prompt' (shows_3.py:3 in show())"),
    ],
)
def test_invalid_demonstration_is_reported_with_its_line(
    data: JobData, body: str, expected_message: str, request: pytest.FixtureRequest
) -> None:
    number = request.node.callspec.indices["body"]
    data.modules_dir.mkdir(exist_ok=True)
    (data.modules_dir / f"shows_{number}.py").write_text(f"def show(rng, progress):\n    {body}\n")
    shows = WarmStartConfig(demonstrations=f"shows_{number}:show")
    demonstrate_with = load_demonstrations(
        replace(data, config=replace(data.config, warm_start=shows))
    )
    with pytest.raises(ConfigError) as error_info:
        demonstrate_with(Random(0), 0.0)
    assert (
        expected_message in error_info.value.message
        and error_info.value.where == "warm_start.demonstrations"
    )


SCHEDULER = "worker/w7"


class SliceCalls(Interface):
    """Part of a worker's interface that handles time slices."""


SliceCalls.methods = {name: Worker.methods[name] for name in ("acquire_slice", "release_slice")}


class SliceRecorder(Actor):
    interface = SliceCalls

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.is_acquired = False

    @call(Worker.acquire_slice)
    def acquire_slice(self, request: AcquireSlice) -> TimeSlice:
        assert not self.is_acquired
        self.functions.append(request.function)
        self.is_acquired = True
        return TimeSlice(request.ticket, 60.0, 0.0)

    @call(Worker.release_slice)
    def release_slice(self, request: ReleaseSlice) -> None:
        self.is_acquired = False


@story_on(partial(run_virtual, limit_s=10000.0), given=2)
async def test_warm_start_runs_in_time_slices(clock: Clock, random: Random, tmp_path: Path) -> None:
    async with Bench(clock, random, tmp_path) as bench:
        core, scheduler, worker = bench.core, SliceRecorder(), bench.mesh(SCHEDULER)
        await worker.join(scheduler)
        core.runner.time_slices = SliceClient(core.mesh, SCHEDULER, "g0.0", 1, enabled=True)
        assert not await core.first_version._build_weights(
            lambda step, loss: None, lambda error_info: None
        )
        assert scheduler.functions == ["warm_start"]

        def pieces() -> Generator[None, None, str]:
            for _ in range(3):
                assert scheduler.is_acquired
                cast(
                    VirtualLoop, asyncio.get_running_loop()
                ).now_s += SLICE_S  # duration of a slice
                yield
            return "made"

        assert await core.first_version.run_in_slices(pieces()) == "made"
        await clock.sleep(1.0)
        assert len(scheduler.functions) > 2 and not scheduler.is_acquired
        await worker.leave()


async def test_progress_counts_replayed_and_warm_start_steps(data: JobData) -> None:
    mesh = alone("trainer/j", SystemClock(), Random(0), SystemHost())
    seat = Placement("g0", "g0", data.id, 1, core=True)
    made = TrainerCore(
        mesh, data, seat, GangCompute(mesh, data.id, Rank.for_single_rank(create_learner(data)))
    )
    groups = [group([1.0, 0.0], number=number, version=0) for number in range(2)]

    async def arrive() -> AsyncIterator[TrajectoryGroup]:
        for one in groups:
            yield one

    updates = (await made._make_step(1, "m0", made.data.config).run(arrive())).updates
    progress_values = [made.stats().progress]
    for _ in range(2):
        await made._make_step(1, "", made.data.config).replay(groups, updates, [1] * len(updates))
        progress_values.append(made.stats().progress)
    made.first_version.warm_start_fraction = 0.5
    progress_values.append(made.stats().progress)
    assert all(before != after for before, after in pairwise(progress_values)), progress_values
