"""First GRPO curve on a Hub dataset with a Hub model: lines to write, and minutes from nothing.

Usage:

    python -m loadtests.first_week [--steps 20]

The Hub is a server on this host (`tests/unit/meshrl/job/hub_server.py`) with a tiny Qwen3 that has
learned some sums, and a dataset of sums as Parquet. Preparing them is not measured. Each arm, the
job file with `meshrl run` and the Python program, starts with an empty cache of the Hub.

`toml_lines` and `python_lines` count lines. `*_minutes` is the time from the command to its end,
`*_steps` the length of the curve, and `*_reward_first` and `*_reward_last` its mean over three
steps at either end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from loadtests.measuring.entry import options, print_progress, report
from meshrl.common.model.tokens.tokenizer import build_character_tokenizer
from meshrl.runs.outcome import EXIT_FINISHED, EXIT_NOT_LEARNED

ROOT = Path(__file__).parents[2]
ALPHABET = "0123456789+=\n"  # tokens 0 to 12
TERMS = 10  # sums of two numbers below this
RUN_TIMEOUT_S = 900.0
PRETRAINING = """\
name = "pretraining"
out = "run"
cache = ""
model.tokenizer = "tokenizer.json"
dataset.train = "train.jsonl"
algorithm.name = "sft"
algorithm.groups_per_step = 64
rollout.max_tokens = 8
rollout.stop = ["\\n"]
optimizer.muon_lr = 0.02
optimizer.adamw_lr = 0.003
budget.steps = {steps}
mesh.workers = 2

[model.config]
model_type = "qwen3"
vocab_size = 13
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
max_position_embeddings = 64
tie_word_embeddings = true
eos_token_id = 12
"""
JOB = """\
name = "sums"
model.path = "lab/tiny-sums"
dataset.train = "lab/sums"
dataset.held_out = "lab/sums"
dataset.columns.prompt = "question"
reward.use = "exact"
rollout.max_tokens = 8
optimizer.adamw_lr = 0.001
budget.steps = {steps}
"""
PROGRAM = """\
import meshrl
def is_right(row, turns):
    return float(turns[-1]["text"].strip() == row["answer"])
config = {{"name": "sums", "model": {{"path": "lab/tiny-sums"}}, "budget": {{"steps": {steps}}}}}
config |= {{"dataset": {{"columns": {{"prompt": "question"}}}}, "rollout": {{"max_tokens": 8}}}}
config |= {{"optimizer": {{"adamw_lr": 0.001}}}}
run = meshrl.run(config, reward=is_right, dataset="lab/sums", held_out="lab/sums")
print(run.metrics[-1]["reward"], run.model)
"""
README = """\
---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
---
"""


def main() -> None:
    """Prepare the Hub, measure both arms, and report."""
    chosen = options(__doc__, steps=20, pretraining_steps=50).parse_args()
    with tempfile.TemporaryDirectory(prefix="meshrl-first-week-") as scratch:
        hub = Path(scratch) / "hub"
        write_dataset(hub / "datasets/lab/sums")
        begin = time.monotonic()
        target = hub / "models/lab/tiny-sums"
        pretrain(Path(scratch) / "pretraining", target, chosen.pretraining_steps)
        figures: dict[str, Any] = {"preparation_minutes": (time.monotonic() - begin) / 60}
        with serve_hub(hub) as url:
            for name, file, text, command in (
                ("toml", "job.toml", JOB, ["-m", "meshrl", "run"]),
                ("python", "program.py", PROGRAM, []),
            ):
                folder = Path(scratch) / name
                folder.mkdir()
                written = text.format(steps=chosen.steps)
                (folder / file).write_text(written)
                figures[name] = {"lines": len(written.split("\n")) - 1} | measure_run(
                    folder, [*command, file], url
                )
                print_progress(figures[name])
        report({k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()})


def measure_run(folder: Path, arguments: Sequence[str], url: str) -> dict[str, Any]:
    """Run a job in a folder, from an empty cache of the Hub; return the figures of its curve."""
    env = {"HF_ENDPOINT": url, "HF_HOME": str(folder / "hub-cache")}
    begin = time.monotonic()
    run_python(folder, arguments, env)
    minutes = (time.monotonic() - begin) / 60
    rows = [json.loads(line) for line in (folder / "runs/sums/metrics.jsonl").open()]
    rewards = [float(row["reward"]) for row in rows if "reward" in row]
    report_file = folder / "runs/sums/report.html"
    return {
        "minutes": round(minutes, 3),
        "steps": len(rewards),
        "reward_first": round(fmean(rewards[:3]), 3),
        "reward_last": round(fmean(rewards[-3:]), 3),
        "has_report": report_file.is_file(),
    }


def pretrain(folder: Path, target: Path, steps: int) -> None:
    """Train a model of the Hub on sums, from scratch; after 50 steps it solves half of them."""
    folder.mkdir()
    build_character_tokenizer(ALPHABET, folder / "tokenizer.json")
    lines = [json.dumps({"prompt": q, "response": f"{a}\n"}) + "\n" for q, a in iterate_sums()]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "job.toml").write_text(PRETRAINING.format(steps=steps))
    run_python(folder, ["-m", "meshrl", "run", "job.toml"], {})
    target.parent.mkdir(parents=True)
    (folder / "run/model").rename(target)


def write_dataset(target: Path) -> None:
    """Write the sums as a repository with two splits in Parquet."""
    import pyarrow as pa
    from pyarrow import parquet

    (target / "data").mkdir(parents=True)
    (target / "README.md").write_text(README)
    rows = [{"question": question, "answer": answer} for question, answer in iterate_sums()]
    for split, part in (("train", [r for i, r in enumerate(rows) if i % 5]), ("test", rows[::5])):
        parquet.write_table(
            pa.Table.from_pylist(part), target / f"data/{split}-00000-of-00001.parquet"
        )


def iterate_sums() -> Iterator[tuple[str, str]]:
    """Yield (question, answer)."""
    for a in range(TERMS):
        for b in range(TERMS):
            yield f"{a}+{b}=", str(a + b)


def run_python(folder: Path, arguments: Sequence[str], env: dict[str, str]) -> None:
    """Run this interpreter in a folder; its output goes to standard error."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=sys.stderr,
        check=False,
        timeout=RUN_TIMEOUT_S,
    )
    if done.returncode not in (EXIT_FINISHED, EXIT_NOT_LEARNED):
        raise SystemExit(f"the run ended with {done.returncode}")


@contextmanager
def serve_hub(root: Path) -> Iterator[str]:
    """Serve the repositories below a directory; yield the server's address."""
    command = [sys.executable, "-m", "tests.unit.meshrl.job.hub_server", "--root", str(root)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
