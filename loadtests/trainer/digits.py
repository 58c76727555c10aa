"""The task of the trainer's load test: a tiny random Qwen2 that learns to write digits.

A trajectory's reward is the share of its tokens that are digits; its length is forced. `write`
makes all that two trainers need to train the same thing.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from loadtests.peers.make_model import Shape, write_model
from meshrl.common.model.tokens.tokenizer import build_character_tokenizer

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"  # "_" pads, "$" ends if needed
SHAPE = Shape("qwen2", hidden=128, layers=2, heads=4, kv_heads=2, ffn=512, vocabulary=96)
ROWS = 512
PROMPT = 4  # tokens: 3+4=
EQUAL = 64  # tokens of each completion
MEDIAN, SIGMA = 24, 1.4  # of the lognormal: the longest tenth then has half of all tokens
LEARNING_RATE = 3e-3

MODULE = '''"""The reward."""


def share_of_digits(row, turns):
    text = turns[-1]["text"]
    return sum(c in "0123456789" for c in text) / len(text)
'''

JOB = Path(__file__).with_name("digits.toml.template")


@dataclass(frozen=True)
class Task:
    """Digits task: the paths of its files, and the size of a step."""

    folder: Path
    lengths: tuple[int, ...]  # of completions, in order, cyclically
    batch: int = 64
    group: int = 8

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl"

    def lengths_file(self) -> Path:
        path = self.folder / "lengths.json"
        path.write_text(json.dumps(self.lengths))
        return path

    def job_file(
        self, out: Path, steps: int, seed: int = 0, staleness: int = 1, workers: int = 2
    ) -> Path:
        path = self.folder / f"{out.name}.toml"
        path.write_text(
            JOB.read_text().format(
                seed=seed,
                out=out,
                workers=workers,
                batch=self.batch,
                max_tokens=PROMPT + max(self.lengths),
                lengths=list(self.lengths),
                group=self.group,
                groups=self.batch // self.group,
                staleness=staleness,
                learning_rate=LEARNING_RATE,
                steps=steps,
            )
        )
        return path


def write(folder: Path, lengths: tuple[int, ...]) -> Task:
    folder.mkdir(parents=True, exist_ok=True)
    task = Task(folder, lengths)
    write_model(task.model, SHAPE)
    build_character_tokenizer(CHARACTERS, task.model / "tokenizer.json")
    rng = random.Random(0)
    prompts = [f"{rng.randint(0, 9)}+{rng.randint(0, 9)}=" for _ in range(ROWS)]
    task.rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "digits_reward.py").write_text(MODULE)
    return task


def long_tail(batch: int = 64, steps: int = 16, seed: int = 0) -> tuple[int, ...]:
    """Return the lengths of `steps` batches with equal quantiles of the lognormal in random order.
    Each step thus has the same number of tokens and a long tail.
    """
    normal = NormalDist(math.log(MEDIAN), SIGMA)
    quantiles = [round(math.exp(normal.inv_cdf((i + 0.5) / batch))) for i in range(batch)]
    rng = random.Random(seed)
    return tuple(n for _ in range(steps) for n in rng.sample(quantiles, batch))


def tail_share(lengths: tuple[int, ...]) -> float:
    """Return the share of tokens in the longest tenth."""
    ordered = sorted(lengths, reverse=True)
    return sum(ordered[: len(ordered) // 10]) / sum(ordered)
