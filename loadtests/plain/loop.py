"""A loop in one process and one thread: generate all, then train."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshrl.common.job.prompt_order import PromptMix, PromptOrder
from meshrl.common.model.architecture.config import ModelConfig
from meshrl.common.model.network.decoder import Decoder
from meshrl.common.model.tokens.tokenizer import Tokenizer
from meshrl.job import job_reader
from meshrl.services.trainer.algorithms import get_algorithm
from meshrl.services.trainer.bins.packing import TrainingSequence, make_bins
from meshrl.services.trainer.initialization.warm_start import DemonstrationLimits, run_steps
from meshrl.services.trainer.learner.learner import Learner, sum_gradients
from meshrl.services.trainer.learner.optimizers import compute_lr_factor

SLOTS = 64  # sequences that decode together: more cost this loop more, since it waits for the last
NARROWEST = 32  # places of the cache that a step looks at, at least; widths are multiples of it
Rows = list[dict[str, Any]]


class Job:
    """A job file and all that it names, loaded."""

    def __init__(self, path: Path, changes: Iterable[str] = ()) -> None:
        """`changes`: KEY=VALUE, as of `meshrl run --set`."""
        self.config, _ = job_reader.load_config(path, list(changes))
        self._folder = path.parent
        sys.path.insert(0, str(path.parent))
        self.model_config = ModelConfig.from_hf(self.config.model.config)
        self.tokenizer = Tokenizer.load(path.parent / self.config.model.tokenizer)
        self.train, self.held_out = (self._rows(x) for x in ("train", "held_out"))
        self.environment = self.named(self.config.environment.use)
        self.reward = self.named(self.config.reward.use)
        self.tools = {k: self.named(v) for k, v in self.config.environment.tools.items()}
        self.stop = [self.tokenizer.encode(text)[0] for text in self.config.rollout.stop]

    def named(self, reference: str) -> Any:
        module, name = reference.split(":")
        return getattr(importlib.import_module(module), name)

    def model(self, seed: int) -> Decoder:
        made = Decoder(self.model_config)
        made.initialise(torch.Generator().manual_seed(seed))
        return made

    def learner(self, model: Decoder) -> Learner:
        return Learner(model, self.config.optimizer, self.config.algorithm)

    def _rows(self, kind: str) -> Rows:
        text = (self._folder / getattr(self.config.dataset, kind)).read_text()
        return [json.loads(line) for line in text.splitlines()]


@dataclass
class Slot:
    group: int
    row: dict[str, Any]
    environment: Any
    said: int  # tokens of the prompt, and of all turns that are over
    turns: Rows = field(default_factory=list)


@dataclass
class Finished:
    group: int
    sequence: TrainingSequence
    reward: float


class Generator:
    """Slots that decode together; prompts and results of tools go through the same step."""

    def __init__(self, job: Job, model: Decoder, seed: int, greedy: bool = False) -> None:
        self.job, self.model, self.greedy = job, model, greedy
        c, self.count, self.limit = (
            model.config,
            SLOTS,
            job.config.rollout.max_tokens,
        )
        self.random = torch.Generator().manual_seed(seed)
        cache = c.num_layers, self.count, c.num_kv_heads, self.limit, c.head_dim
        self.keys, self.values = torch.zeros(cache), torch.zeros(cache)
        self.index, self.places = torch.arange(self.count), torch.arange(self.limit)
        self.slots: list[Slot | None] = [None] * self.count
        self.tokens = np.zeros((self.count, self.limit + 1), np.int64)
        self.logprobs = np.zeros((self.count, self.limit + 1), np.float32)
        self.sampled = np.zeros((self.count, self.limit + 1), bool)
        self.position = np.zeros(self.count, np.int64)  # of the next input token
        self.known = np.zeros(self.count, np.int64)  # tokens that are there already

    def run(self, wanted: list[tuple[int, dict[str, Any]]]) -> Iterator[Finished]:
        wanted = wanted[::-1]
        while True:
            for index, slot in enumerate(self.slots):
                if slot is None and wanted:
                    self._open(index, *wanted.pop())
            if not any(self.slots):
                return
            yield from self._step()

    def _open(self, index: int, group: int, row: dict[str, Any]) -> None:
        environment = self.job.environment()
        prompt = self.job.tokenizer.encode_start(environment.open(row))
        self.sampled[index], self.logprobs[index], self.position[index] = False, 0, 0
        self.tokens[index, : len(prompt)] = prompt
        self.known[index] = len(prompt)
        self.slots[index] = Slot(group, row, environment, len(prompt))

    @torch.inference_mode()
    def _step(self) -> list[Finished]:
        active = np.array([slot is not None for slot in self.slots])
        chosen, logprobs = self._decode(int(self.position[active].max()) + 1)
        self.position += active
        new = np.flatnonzero(active & (self.position >= self.known))
        at = self.position[new]
        self.tokens[new, at], self.logprobs[new, at] = chosen[new], logprobs[new]
        self.sampled[new, at] = True
        self.known[new] = at + 1
        ends = np.isin(chosen[new], self.job.stop) | (at >= self.limit - 1)
        return [done for index in new[ends] if (done := self._turn(int(index)))]

    def _decode(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        width = min(-(-width // NARROWEST) * NARROWEST, self.limit)
        position = torch.from_numpy(self.position)
        mask = torch.where(self.places[:width] <= position[:, None], 0.0, -1e30)[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
            assert not window
            keys, values = self.keys[layer], self.values[layer]
            keys[self.index, :, position], values[self.index, :, position] = k, v
            shared = q.view(len(q), k.shape[1], -1, q.shape[2])  # queries by their kv head
            seen = mask.expand(-1, -1, shared.shape[2], -1)
            mixed = scaled_dot_product_attention(
                shared, keys[:, :, :width], values[:, :, :width], attn_mask=seen
            )
            return mixed.flatten(1, 2)

        tokens = torch.from_numpy(self.tokens[np.arange(self.count), self.position])
        logprobs = self.model.compute_logits(self.model(tokens, position, attend)).log_softmax(-1)
        noise = torch.empty_like(logprobs).exponential_(generator=self.random).log_()
        chosen = (logprobs if self.greedy else logprobs - noise).argmax(-1, keepdim=True)
        return chosen[:, 0].numpy(), logprobs.gather(1, chosen)[:, 0].numpy()

    def _turn(self, index: int) -> Finished | None:
        """Pass the ended turn to the environment; return the trajectory if it is finished."""
        slot, known = self.slots[index], int(self.known[index])
        assert slot is not None
        text = self.job.tokenizer.decode(self.tokens[index, slot.said : known].tolist())
        slot.turns.append({"role": "model", "text": text})
        action: dict[str, Any] = {"done": True}
        if known < self.limit:
            action = slot.environment.step(text)
        if "tool" in action:
            name, value = action["tool"], action["input"]
            result = self.job.tools[name](value)
            slot.turns.append({"role": "tool", "name": name, "input": value, "value": result})
            action = slot.environment.result(result)
        reply = self.job.tokenizer.encode(action.get("append", ""))
        slot.said = known + len(reply)
        calls = sum(turn["role"] == "tool" for turn in slot.turns)
        if "done" in action or calls > self.job.config.rollout.max_turns or slot.said >= self.limit:
            slot.environment.close()
            self.slots[index], self.position[index] = None, 0
            tokens = self.tokens[index, :known].astype(np.int32)
            sampled = self.sampled[index, :known].copy()
            logprobs = self.logprobs[index, :known].copy()
            sequence = TrainingSequence(tokens, logprobs, sampled, np.zeros(known, np.int32))
            return Finished(slot.group, sequence, float(self.job.reward(slot.row, slot.turns)))
        self.tokens[index, known : slot.said] = reply
        self.known[index] = slot.said
        return None


def accuracy(job: Job, model: Decoder, greedy: bool, seed: int = 0) -> float:
    generator = Generator(job, model, seed, greedy)
    return float(np.mean([done.reward for done in generator.run(list(enumerate(job.held_out)))]))


def train_step(job: Job, learner: Learner, groups: list[list[Finished]], factor: float) -> int:
    """Train one update; return the tokens of the groups that it used."""
    config, used = job.config.algorithm, []
    for group in groups:
        rewards = np.array([done.reward for done in group])
        advantages = get_algorithm(config.name).compute_advantages(rewards, config)
        for done, advantage in zip(group, [] if advantages is None else advantages, strict=False):
            done.sequence.advantages = np.array(advantage, np.float32)
            used.append(done.sequence)
    if used:
        bins = make_bins(used, job.config.training.bin_tokens)
        gradient, stats = sum_gradients(learner.compute_gradient(bin) for bin in bins)
        learner.apply_gradient(gradient, stats.tokens, factor)
    return sum(len(sequence.tokens) for sequence in used)


def run_plain(job: Job, seed: int, steps: int, state: dict[str, Tensor]) -> dict[str, Any]:
    """Train the model of `state` in place and return the cost, without evaluation."""
    model = job.model(seed)
    model.load_state_dict(state)
    learner, config = job.learner(model), job.config.algorithm
    order = PromptOrder(
        PromptMix(seed, [1.0]), [len(job.train)], shuffles=job.config.dataset.shuffle
    )
    generator = Generator(job, model, seed)
    rewards, trained, begun = [], 0, time.process_time()
    for step in range(steps):
        first = step * config.groups_per_step
        picked = [order.find_row(first + i) for i in range(config.groups_per_step)]
        groups: list[list[Finished]] = [[] for _ in picked]
        wanted = [
            (i, job.train[row]) for i, row in enumerate(picked) for _ in range(config.group_size)
        ]
        for done in generator.run(wanted):
            groups[done.group].append(done)
        members = [done for group in groups for done in group]
        rewards.append(float(np.mean([done.reward for done in members])))
        trained += train_step(
            job, learner, groups, compute_lr_factor(step, steps, job.config.optimizer)
        )
    cpu_s = time.process_time() - begun
    state.update(learner.get_weights())
    return {
        "cpu_s": cpu_s,
        "cpu_s_per_step": cpu_s / steps,
        "tokens_trained": trained,
        "rewards": rewards,
    }


def warmed_up(job: Job, seed: int) -> dict[str, Tensor]:
    learner, config = job.learner(job.model(seed)), job.config
    held_out = {row[config.dataset.prompt] for row in job.held_out}
    for _ in run_steps(
        learner,
        job.named(config.warm_start.demonstrations),
        job.tokenizer,
        config.warm_start,
        DemonstrationLimits(held_out, config.rollout.max_tokens),
        seed=seed,
        bin_tokens=config.training.bin_tokens,
    ):
        pass
    return learner.get_weights()
