"""Five steps of GRPO in one process: the engine samples, a reward scores, the learner updates."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from loadtests.gpu.generating import build_requests, draw_prompts, generate, start_engine
from loadtests.gpu.measuring import build_config, draw_model
from loadtests.gpu.plan import Figures, Incorrect, Settings
from meshrl.common.job.config import AlgorithmConfig, OptimizerConfig
from meshrl.services.trainer.algorithms import get_algorithm
from meshrl.services.trainer.bins.packing import TrainingSequence, make_bins
from meshrl.services.trainer.learner.learner import Learner, sum_gradients
from meshrl.services.trainer.learner.stats import BinStats

STEPS = 5
BIN_TOKENS = 16_384
MAX_MEAN_GAP = 0.05  # of log-probabilities, between bfloat16 sums in two orders
Sampled = tuple[NDArray[np.int32], NDArray[np.float32]]


def score_tokens(tokens: NDArray[np.int32]) -> float:
    """Return the reward of a trajectory: its share of even ids."""
    return float((tokens % 2 == 0).mean())


class Loop:
    """Engine and learner of one model, with the settings of a run."""

    def __init__(self, settings: Settings) -> None:
        self.algorithm = AlgorithmConfig(
            group_size=4 if settings.is_tiny else 16, groups_per_step=2 if settings.is_tiny else 16
        )
        self.new_tokens, prompt = (8, 4) if settings.is_tiny else (96, 32)
        config = build_config(settings)
        self.dtype = torch.float32 if settings.is_tiny else torch.bfloat16
        optimizer = OptimizerConfig(muon_lr=0.02, schedule="constant", warmup_steps=1)
        model = draw_model(settings, config, torch.float32)
        self.learner = Learner(model, optimizer, self.algorithm, dtype=self.dtype)
        count = self.algorithm.group_size * self.algorithm.groups_per_step
        name = str(self.dtype).removeprefix("torch.")
        self.engine = start_engine(settings, config, count, prompt + self.new_tokens, name)
        self.engine.wake(self.learner.get_weights(), 0)
        self.prompts = draw_prompts(config, self.algorithm.groups_per_step * STEPS, prompt)

    def sample_groups(self, step: int) -> list[list[TrainingSequence]]:
        """Return the step's groups with their rewards as advantages."""
        size, count = self.algorithm.group_size, self.algorithm.groups_per_step
        prompts = self.prompts[step * count : (step + 1) * count]
        repeated = [prompt for prompt in prompts for _ in range(size)]
        first = step * size * count
        found = generate(
            self.engine, build_requests(repeated, self.new_tokens, temperature=1.0, first=first)
        )
        members = [
            build_sequence(prompt, found[first + i], step) for i, prompt in enumerate(repeated)
        ]
        return [members[at : at + size] for at in range(0, len(members), size)]

    def train(self, groups: list[list[TrainingSequence]], step: int) -> BinStats:
        """Apply one update; `advantages` of the sequences are their rewards so far."""
        used = []
        for group in groups:
            rewards = np.array([float(member.advantages) for member in group])
            found = get_algorithm(self.algorithm.name).compute_advantages(rewards, self.algorithm)
            if found is None:
                continue  # all rewards are equal
            for member, advantage in zip(group, found, strict=True):
                member.advantages = np.array(advantage, np.float32)
                used.append(member)
        bins = make_bins(used, BIN_TOKENS, version=step)
        gradient, stats = sum_gradients(self.learner.compute_gradient(bin) for bin in bins)
        self.learner.apply_gradient(gradient, stats.tokens, 1.0)
        self.engine.update_weights(self.learner.get_weights(), step + 1)
        return stats


def build_sequence(prompt: NDArray[np.int32], sampled: Sampled, version: int) -> TrainingSequence:
    """Return a trajectory, with its reward in place of an advantage."""
    tokens, logprobs = sampled
    zeros = np.zeros(len(prompt), np.float32)
    return TrainingSequence(
        tokens=np.concatenate((prompt, tokens)),
        logprobs=np.concatenate((zeros, logprobs)),
        loss_mask=np.arange(len(prompt) + len(tokens)) >= len(prompt),
        versions=np.full(len(prompt) + len(tokens), version, np.int32),
        advantages=np.array(score_tokens(tokens)),
    )


def run_steps(settings: Settings) -> Figures:
    """Run the steps; return times, rewards, and the gap between engine and learner."""
    loop = Loop(settings)
    rewards, seconds, gaps = [], [], []
    for step in range(STEPS):
        began = time.perf_counter()
        groups = loop.sample_groups(step)
        rewards.append(float(np.mean([float(m.advantages) for group in groups for m in group])))
        stats = loop.train(groups, step)
        seconds.append(time.perf_counter() - began)
        gaps.append(stats.gap_sum / max(stats.fresh_tokens, 1))
        if not stats.fresh_tokens:
            raise Incorrect("no token was sampled by the weights that were trained")
    if max(gaps) > MAX_MEAN_GAP:
        raise Incorrect(f"engine and learner differ by {max(gaps):.3g} per token on average")
    return {
        "step_s": float(np.median(seconds)),
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "mean_logprob_gap": max(gaps),
    }


CASES = {"five_steps": run_steps}
