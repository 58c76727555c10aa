"""Run of TRL's GRPOTrainer on a CPU with forced output lengths, reported in one line of JSON.

Usage:

    .venvs/trl/bin/python loadtests/peers/trl_grpo.py --model DIR --rows FILE [--lengths FILE]

Runs in an environment of its own (`install_trl.sh`) and imports nothing of ours. A completion's
reward is the share of its tokens that are digits. `--lengths` is a JSON list: completion i of the
run has entry i of it, cyclically. Its end token cannot be sampled before that and is what comes
there; the longest of a batch ends without one. `cpu_s` is from the end of a step to the end of the
next, all of the process; the first step is counted from its beginning.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

PAD, END = "_", "$"


class Forced(LogitsProcessor):
    """Suppresses the end token until a completion's length, and then leaves nothing else."""

    def __init__(self, end: int, lengths: list[int], prompt: int) -> None:
        self._end, self._prompt = end, prompt
        last = torch.tensor(lengths) - 1  # index of a completion's last token
        self._last = last.masked_fill(last == last.max(), -1)  # generation ends there by itself

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends = self._last == input_ids.shape[1] - self._prompt
        forced = scores.masked_fill(ends[:, None], -torch.inf)
        forced[:, self._end] = torch.where(ends, 0.0, -torch.inf)
        return forced


def force_lengths(model: Any, end: int, lengths: list[int]) -> None:
    """Make later calls of `model.generate` take their lengths from the list, in order."""
    generate, taken = model.generate, 0

    def forced(*args: Any, **kwargs: Any) -> Any:
        nonlocal taken
        rows, prompt = kwargs["input_ids"].shape
        own = [lengths[(taken + i) % len(lengths)] for i in range(rows)]
        taken += rows
        kwargs["generation_config"].max_new_tokens = max(own)
        processors = LogitsProcessorList([Forced(end, own, prompt)])
        return generate(*args, **kwargs, logits_processor=processors)

    model.generate = forced


class Meter(TrainerCallback):
    def __init__(self) -> None:
        self.cpu_s: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.cpu_s:
            self.cpu_s.append(time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.cpu_s.append(time.process_time())


def digits_reward(tokenizer: PreTrainedTokenizerFast) -> Any:
    digits = {tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"}

    def share_of_digits(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(i in digits for i in ids) / len(ids) for ids in completion_ids]

    return share_of_digits


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--rows", type=Path, required=True, help='JSONL of {"prompt": text}')
    parser.add_argument("--lengths", type=Path, help="JSON list of output lengths")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=64, help="longest completion without --lengths")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    fast: Any = PreTrainedTokenizerFast  # its constructor is not typed
    tokenizer = fast(
        tokenizer_file=str(chosen.model / "tokenizer.json"), pad_token=PAD, eos_token=END
    )
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32)
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    rows = [json.loads(line) for line in chosen.rows.read_text().splitlines()]
    lengths = json.loads(chosen.lengths.read_text()) if chosen.lengths else []
    meter = Meter()
    with tempfile.TemporaryDirectory(prefix="trl-") as scratch:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=digits_reward(tokenizer),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[meter],
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=chosen.batch,
                num_generations=chosen.group,
                max_completion_length=max(lengths, default=chosen.new),
                max_steps=chosen.steps,
                learning_rate=chosen.learning_rate,
                lr_scheduler_type="constant",
                adam_beta2=0.95,
                beta=0.0,
                temperature=1.0,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=chosen.seed,
            ),
        )
        if lengths:
            force_lengths(trainer.model, tokenizer.eos_token_id, lengths)
        trainer.train()
    logs = [row for row in trainer.state.log_history if "reward" in row]
    told = {
        "cpu_s": [round(b - a, 4) for a, b in itertools.pairwise(meter.cpu_s)],
        "reward": [row["reward"] for row in logs],
        "length_mean": [row["completions/mean_length"] for row in logs],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
