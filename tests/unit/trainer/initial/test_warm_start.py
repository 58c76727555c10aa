"""The warm start and its cache."""

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.common.base.errors import ConfigError, Damaged
from meshrl.common.base.random import Random
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig, WarmStartConfig
from meshrl.common.job.constraints import AlgorithmName
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.tokens.tokenizer import Tokenizer, character_tokenizer
from meshrl.services.trainer.arithmetic.learner import Learner
from meshrl.services.trainer.bins.packing import Bin, make_bins
from meshrl.services.trainer.initial import warm_start as warm
from meshrl.services.trainer.models import critic

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=16,
    hidden_size=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ffn_size=24,
    tie_embeddings=True,
    max_positions=64,
)
CONFIG = WarmStartConfig(steps=20, batch=8, warmup_steps=2)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return character_tokenizer("_$?=0123456789", tmp_path / "tokenizer.json")


def echo(random: Random, progress: float) -> warm.Segments:
    """A digit, to be said three times."""
    digit = str(random.randrange(10))
    return [(f"?{digit}=", False), (digit * 3 + "$", True)]


def fresh(
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
    learner = learner or fresh()
    losses: list[tuple[int, float]] = []
    limits: dict[str, Any] = {"held_out": set(), "max_tokens": 32} | changes
    steps = warm.pieces(
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


def test_the_model_learns_the_demonstrations(tokenizer: Tokenizer) -> None:
    learner, losses = run(tokenizer)
    assert [step for step, _ in losses] == list(range(1, 21))
    assert losses[-1][1] < losses[0][1] - 0.3
    assert learner.steps == 0


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tokenizer: Tokenizer) -> None:
    first, second, other = (run(tokenizer, seed=seed)[0].weights() for seed in (3, 3, 4))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())


def shown(tokenizer: Tokenizer) -> Bin:
    made = [warm.encode([(f"?{digit}=", False), ("777$", True)], tokenizer) for digit in range(4)]
    (bin,) = make_bins(made, 256)
    return bin


def test_passes_in_bfloat16_are_of_the_warm_weights_at_once(tokenizer: Tokenizer) -> None:
    learner, _ = run(tokenizer, learner=fresh(dtype=torch.bfloat16))
    other, bin = fresh(dtype=torch.bfloat16), shown(tokenizer)
    cold = other.score(bin)
    other.load_weights(learner.weights())
    scores = learner.score(bin)
    assert (scores == other.score(bin)).all() and abs(scores - cold).max() > 0.3


def test_a_critic_begins_with_the_warm_weights(tokenizer: Tokenizer) -> None:
    learner, _ = run(tokenizer, learner=fresh(name="ppo"))
    weights = learner.weights()
    trunk = dict(critic.critic_of(learner.model).trunk.named_parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in trunk.items())
    assert not learner.score(shown(tokenizer), "values").any()


def test_a_mixture_of_experts_is_balanced_while_it_warms(tokenizer: Tokenizer) -> None:
    sparse = replace(
        MODEL,
        architecture="qwen3_moe",
        qk_norm=True,
        experts=4,
        experts_per_token=1,
        expert_ffn_size=16,
    )
    bin = shown(tokenizer)
    plain, cross_entropy = fresh(sparse, "sft").gradient(bin)
    both, stats = fresh(replace(sparse, balance_coefficient=0.1), "sft").gradient(bin)
    assert stats == cross_entropy  # of what is shown, the loss is told as it was
    balanced = fresh(replace(sparse, balance_coefficient=0.1))
    balanced_bin = shown(tokenizer)
    balanced_bin.advantage[:] = 0.0
    alone, _ = balanced.gradient(balanced_bin)
    assert alone.any()
    torch.testing.assert_close(both, plain + alone, rtol=1e-4, atol=1e-5)


def test_held_out_prompts_are_never_demonstrated(tokenizer: Tokenizer) -> None:
    shown = []

    def remembering(random: Random, progress: float) -> warm.Segments:
        segments = echo(random, progress)
        shown.append((segments[0][0], progress))
        return segments

    run(tokenizer, remembering, held_out={"?3="})
    used = [prompt for prompt, _ in shown if prompt != "?3="]
    assert len(shown) > len(used) == CONFIG.steps * CONFIG.batch
    assert shown[0][1] == 0.0 and 0.9 < shown[-1][1] < 1.0


def test_demonstrations_that_cannot_be_used_end_in_an_error_that_says_so(
    tokenizer: Tokenizer,
) -> None:
    with pytest.raises(ConfigError, match=r"warm_start\.demonstrations"):
        run(tokenizer, max_tokens=4)


def test_segments_are_encoded_one_by_one_and_only_the_model_s_are_trained(
    tokenizer: Tokenizer,
) -> None:
    made = warm.encode([("?12=", False), ("3$", True)], tokenizer)
    assert made.tokens.tolist() == [2, 5, 6, 3, 7, 1]
    assert made.mask.tolist() == [False, False, False, False, True, True]


def test_the_learning_rate_warms_up_stays_and_falls_to_nothing() -> None:
    config = WarmStartConfig(steps=100, warmup_steps=20, decay=0.4)
    factors = [warm.lr_factor(step, config) for step in range(100)]
    assert factors[0] == pytest.approx(0.05) and factors[19:61] == [1.0] * 42
    assert factors[80] == pytest.approx(0.5) and factors[-1] == pytest.approx(1 / 40)


def test_the_cache_returns_what_was_kept_under_the_same_job_only(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    learner, _ = run(tokenizer)
    path = warm.cache_path(str(tmp_path), {"seed": 3, "steps": 12}, [b"def demonstrate"])
    assert warm.load(path) is None
    warm.save(path, learner.weights())
    again = warm.cache_path(str(tmp_path), {"steps": 12, "seed": 3}, [b"def demonstrate"])
    kept = warm.load(again)
    assert kept is not None
    assert all(torch.equal(tensor, kept[name]) for name, tensor in learner.weights().items())
    others = [
        warm.cache_path(str(tmp_path), {"seed": 4, "steps": 12}, [b"def demonstrate"]),
        warm.cache_path(str(tmp_path), {"seed": 3, "steps": 12}, [b"def", b" demonstrate"]),
    ]
    assert len({again, *others}) == 3
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == [path.name]


@pytest.mark.parametrize("left", [0, 20, -40, None])
def test_a_damaged_cache_is_no_warm_start(
    tokenizer: Tokenizer, tmp_path: Path, left: int | None
) -> None:
    learner, _ = run(tokenizer)
    path = tmp_path / "kept.safetensors"
    warm.save(path, learner.weights())
    content = bytearray(path.read_bytes())
    content[-9] ^= 1  # of a weight
    path.write_bytes(content[:left])
    with pytest.raises(Damaged, match="a warm start"):
        warm.load(path)
