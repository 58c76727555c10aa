"""Mistakes in the job file itself."""

from __future__ import annotations

from loadtests.mistakes.job import POSITIONS, toml
from loadtests.mistakes.mistake import Mistake

_MINIMAL = {
    "model": {"path": "model"},
    "dataset": {"train": "train.jsonl"},
    "reward": {"use": "mine:reward"},
}

MISTAKES = (
    Mistake("job: unknown key", ("max_tokn", "max_tokens"), set={"rollout.max_tokn": 24}),
    Mistake("job: unknown table", ("rolout", "rollout"), set={"rolout.slots": 8}),
    Mistake("job: wrong type", (r"budget\.steps", "ten", "job.toml"), set={"budget.steps": "ten"}),
    Mistake("job: out of range", (r"rollout\.top_p", "1.5"), set={"rollout.top_p": 1.5}),
    Mistake("job: one worker", (r"mesh\.workers", "2"), set={"mesh.workers": 1}),
    Mistake(
        "job: unknown algorithm", ("algorithm.name", "gpro", "grpo"), set={"algorithm.name": "gpro"}
    ),
    Mistake(
        "job: TOML that does not parse",
        (r"job\.toml", "line|:2"),
        files={"job.toml": 'name = "mine\nseed = 1\n'},
    ),
    Mistake("job: not UTF-8", (r"job\.toml", "utf-8"), files={"job.toml": b'name = "m\xfcne"\n'}),
    Mistake("job: no such file", (r"jbo\.toml",), argv=("run", "jbo.toml")),
    Mistake("job: a directory", ("model", "directory|folder"), argv=("run", "model")),
    Mistake("job: empty", ("model",), files={"job.toml": ""}),
    Mistake("job: no model", (r"model\.path",), set={"model.path": None}),
    Mistake("job: no dataset", (r"dataset\.train",), set={"dataset.train": None}),
    Mistake("job: no reward", (r"reward\.use",), set={"reward.use": None}),
    Mistake(
        "job: groups that can never be whole",
        ("min_group", "group"),
        set={"algorithm.min_group": 5},
    ),
    Mistake(
        "job: a KL term without a reference",
        ("kl", "reference"),
        set={"algorithm.kl_coefficient": 0.1},
    ),
    Mistake(
        "job: truncated sampling without a correction",
        ("top_k|top_p", "correction"),
        set={"rollout.top_k": 5},
    ),
    Mistake(
        "job: more positions than the model has",
        ("max_tokens", str(POSITIONS), "1024"),
        set={"rollout.max_tokens": 1024},
    ),
    Mistake(
        "job: the minimal job of a model with few positions",
        ("max_tokens", str(POSITIONS)),
        files={"job.toml": toml(_MINIMAL)},
    ),
    Mistake(
        "job: an unknown stop token",
        (r"rollout\.stop", r"<\|im_end\|>"),
        set={"rollout.stop": ["<|im_end|>"]},
    ),
    Mistake(
        "job: ranks for all workers", ("workers", "2 that train|ranks"), set={"training.ranks": 2}
    ),
    Mistake(
        "job: --set of an unknown key",
        ("budget.step", "steps"),
        argv=("run", "job.toml", "--set", "budget.step=3"),
    ),
    Mistake(
        "job: --set without a value",
        ("budget.steps", "=|VALUE"),
        argv=("run", "job.toml", "--set", "budget.steps"),
    ),
    Mistake(
        "job: a LoRA target that is none",
        ("lora.targets", "q_prj"),
        set={"lora.rank": 4, "lora.targets": ["q_prj"]},
    ),
    Mistake(
        "job: dry run of a mistake",
        ("max_tokens", str(POSITIONS)),
        set={"rollout.max_tokens": 1024},
        argv=("run", "job.toml", "--dry-run"),
    ),
)
