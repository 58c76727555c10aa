"""Trajectories that a run has kept, which `services/rollout/sample_writer` chose.

Read from the files of the run's shards, while it goes on and after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshrl.common.base.files.json_lines import decode_row

Sample = dict[str, Any]
ROTATED_SUFFIX = ".older.jsonl"  # ends the name of a file that another has followed


def list_files(run_dir: Path) -> list[Path]:
    """The files that shards write."""
    return sorted(run_dir.glob("samples*.jsonl"))


def read_samples(run_dir: Path) -> list[Sample]:
    """All samples of a run, oldest first, that are not damaged; a line that is being written is
    left for later.
    """
    found = (sample for path in list_files(run_dir) for sample in _read_rows(path))
    return sorted(found, key=lambda sample: float(sample["at"]))


def read_evaluation_samples(run_dir: Path) -> list[Sample]:
    """Those of evaluations, oldest first; the others, which may be many, are not held."""
    every = (sample for path in list_files(run_dir) for sample in _read_rows(path))
    found = (sample for sample in every if sample.get("evaluation"))
    return sorted(found, key=lambda sample: float(sample["at"]))


def _read_rows(path: Path) -> Iterator[Sample]:
    """The whole rows of a file, one by one; OSError where it is none, as for a directory."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and (sample := decode_row(line[:-1])) is not None:
                yield sample


def list_corrupt(run_dir: Path) -> list[str]:
    """Which files have lines that are damaged, and how many."""
    counts = {p: p.read_bytes().split(b"\n")[:-1] for p in list_files(run_dir)}
    wrong = {
        path: sum(decode_row(line) is None for line in lines) for path, lines in counts.items()
    }
    return [f"{path}: {count} samples cannot be read" for path, count in wrong.items() if count]


def find_file_ends(run_dir: Path) -> dict[Path, int]:
    """Where the whole lines of each file end now."""
    return {path: path.read_bytes().rfind(b"\n") + 1 for path in list_files(run_dir)}


def read_new(run_dir: Path, offsets: dict[Path, int]) -> Iterator[Sample]:
    """What has come behind `read_to`, which is moved on."""
    for path in list_files(run_dir):
        if path.name.endswith(ROTATED_SUFFIX):
            continue
        at = offsets.get(path, 0)
        at = at if at <= path.stat().st_size else 0  # it has started again
        with path.open("rb") as file:
            file.seek(at)
            content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        offsets[path] = at + len(content)
        rows = map(decode_row, content.split(b"\n")[:-1])
        yield from (sample for sample in rows if sample is not None)


def select_samples(samples: Sequence[Sample], order: str, limit: int) -> list[Sample]:
    """The last ones, or the best, the worst or the last that failed; of several that are alike the
    newest. The one that matters most comes last, next to the prompt of the shell.
    """
    fitting = [s for s in samples if matches_order(s, order)]
    if order in ("best", "worst"):
        sign = 1 if order == "best" else -1
        fitting.sort(key=lambda s: (sign * s["reward"], s["at"]))
    return fitting[-limit:] if limit > 0 else []


def matches_order(sample: Sample, order: str) -> bool:
    """Whether it is one of those asked for: failed ones have no reward, so they are no worst."""
    return order == "" or (sample["reward"] is None) == (order == "failed")


def format_heading(sample: Sample) -> str:
    """What there is to know of a sample in one line."""
    where = f"evaluation {sample['evaluation']}, " if sample.get("evaluation") else ""
    reward = "no reward" if sample["reward"] is None else f"reward {sample['reward']:.3f}"
    versions = sample["versions"]
    span = "-".join(str(v) for v in dict.fromkeys(versions)) or "none"
    parts = [
        f"step {sample['step']}",
        f"{where}{sample['set']}, group {sample['group']}.{sample['member']}",
        reward,
        describe_end(sample),
        f"{sample['tokens']} tokens, {sample['sampled']} sampled",
        f"version {span}, staleness {sample['staleness']}",
        "/".join(sample["why"]),
    ]
    return " | ".join(parts)


def describe_end(sample: Sample) -> str:
    """Why it ended."""
    if sample["error"]:
        return str(sample["error"])
    known = {"length": "cut at rollout.max_tokens", "turns": "cut at rollout.max_turns"}
    ending = str(sample["ending"])
    return known.get(ending, ending)


def split_parts(sample: Sample) -> Iterator[tuple[str, str, str]]:
    """(role, title, text) of the prompt and of each turn."""
    yield "prompt", "prompt", sample["prompt"] or json.dumps(sample["row"], ensure_ascii=False)
    for turn in sample["turns"]:
        if turn["role"] == "tool":
            asked = turn["input"]
            asked = asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)
            yield "tool", f"tool {turn['name']}({asked})", turn["text"]
        else:
            cut = " (cut)" if turn["role"] == "model" and not turn["stop"] else ""
            yield turn["role"], turn["role"] + (cut if turn.get("truncated") else ""), turn["text"]


def select_evaluations(samples: Sequence[Sample]) -> list[Sample]:
    """Those of the first and the last two evaluations, by set: the best, the worst, the failed."""
    found = [s for s in samples if s.get("evaluation")]
    tags = list(dict.fromkeys(s["evaluation"] for s in found))
    return [s for s in found if s["evaluation"] in {*tags[:1], *tags[-2:]}]


def make_table_rows(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row each for a tracker: what it is, the prompt, what followed, the reward."""
    return [
        {
            "set": s["set"],
            "why": "/".join(s["why"]),
            "reward": s["reward"],
            "ending": describe_end(s),
            "tokens": s["tokens"],
            "prompt": s["prompt"] or json.dumps(s["row"], ensure_ascii=False),
            "turns": "\n".join(f"{title}: {text}" for _, title, text in list(split_parts(s))[1:]),
        }
        for s in samples
    ]
