"""Trajectories that a run has stored, selected by `services/rollout/sample_writer`.

Read from the files of the run's shards, during the run and after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshrl.common.base.files.json_lines import decode_row

Sample = dict[str, Any]
MAX_CELL_CHARS = 500  # of a key of a row that is shown
EVALUATION_GROUPS = 1 << 20  # groups of a set in an evaluation: lower bits of their number
ROTATED_SUFFIX = ".older.jsonl"  # suffix of a rotated file


def list_files(run_dir: Path) -> list[Path]:
    """Return the files that shards write."""
    return sorted(run_dir.glob("samples*.jsonl"))


def read_samples(run_dir: Path) -> list[Sample]:
    """Return all valid samples of a run, oldest first; skip a line that is being written."""
    return sorted(iterate_samples(run_dir), key=lambda sample: float(sample["at"]))


def iterate_samples(run_dir: Path) -> Iterator[Sample]:
    """Yield all valid samples of a run, file by file."""
    for path in list_files(run_dir):
        yield from _read_rows(path)


def _read_rows(path: Path) -> Iterator[Sample]:
    """Yield the complete rows of a file. Raises OSError if it is none, such as a directory."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and (sample := decode_row(line[:-1])) is not None:
                yield sample


def list_corrupt(run_dir: Path) -> list[str]:
    """Return which files have corrupt lines, and how many."""
    counts = {p: p.read_bytes().split(b"\n")[:-1] for p in list_files(run_dir)}
    wrong = {
        path: sum(decode_row(line) is None for line in lines) for path, lines in counts.items()
    }
    return [f"{path}: {count} samples are unreadable" for path, count in wrong.items() if count]


def find_file_ends(run_dir: Path) -> dict[Path, int]:
    """Return where the complete lines of each file end now."""
    return {path: path.read_bytes().rfind(b"\n") + 1 for path in list_files(run_dir)}


def read_new(run_dir: Path, offsets: dict[Path, int]) -> Iterator[Sample]:
    """Yield samples behind `offsets`, and advance them."""
    for path in list_files(run_dir):
        if path.name.endswith(ROTATED_SUFFIX):
            continue
        at = offsets.get(path, 0)
        at = at if at <= path.stat().st_size else 0  # the file has started again
        with path.open("rb") as file:
            file.seek(at)
            content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        offsets[path] = at + len(content)
        rows = map(decode_row, content.split(b"\n")[:-1])
        yield from (sample for sample in rows if sample is not None)


def select_samples(samples: Sequence[Sample], order: str, limit: int) -> list[Sample]:
    """Return the last samples, or the best, the worst or the last that failed.

    Of equal ones the newest win. The most important one comes last, next to the shell's prompt.
    """
    fitting = [s for s in samples if matches_order(s, order)]
    if order in ("best", "worst"):
        sign = 1 if order == "best" else -1
        fitting.sort(key=lambda s: (sign * s["reward"], s["at"]))
    return fitting[-limit:] if limit > 0 else []


def matches_order(sample: Sample, order: str) -> bool:
    """Return True if the sample fits the order: failed ones have no reward, so are never worst."""
    return order == "" or (sample["reward"] is None) == (order == "failed")


def format_heading(sample: Sample) -> str:
    """Return the facts about a sample in one line."""
    where = f"evaluation {sample['evaluation']}, " if sample.get("evaluation") else ""
    evaluated = bool(sample.get("evaluation"))
    number = sample["group"] % EVALUATION_GROUPS if evaluated else sample["group"]
    reward = format_reward(sample)
    versions = sample["versions"]
    span = "-".join(str(v) for v in dict.fromkeys(versions)) or "none"
    parts = [
        f"step {sample['step']}",
        f"{where}{sample['set']}, {'row' if evaluated else 'group'} {number}.{sample['member']}",
        reward if sample["reward"] is None else f"reward {reward}",
        describe_end(sample),
        f"{sample['tokens']} tokens, {sample['sampled']} sampled",
        f"version {span}, staleness {sample['staleness']}",
        "/".join(sample["why"]),
    ]
    return " | ".join(parts)


def format_reward(sample: Sample) -> str:
    """Return the reward as text, with its metrics."""
    if sample["reward"] is None:
        return "no reward"
    metrics = ", ".join(f"{name} {value:g}" for name, value in sample.get("metrics", {}).items())
    return f"{sample['reward']:.3f}" + (f" ({metrics})" if metrics else "")


def describe_end(sample: Sample) -> str:
    """Return why the trajectory ended."""
    if sample["error"]:
        return str(sample["error"])
    known = {"length": "cut at rollout.max_tokens", "turns": "cut at rollout.max_turns"}
    ending = str(sample["ending"])
    return known.get(ending, ending)


def split_parts(sample: Sample) -> Iterator[tuple[str, str, str]]:
    """Yield (role, title, text) of the prompt and of each turn."""
    yield "prompt", "prompt", sample["prompt"] or json.dumps(sample["row"], ensure_ascii=False)
    for turn in sample["turns"]:
        if turn["role"] == "tool":
            tool_input = turn["input"]
            tool_input = (
                tool_input
                if isinstance(tool_input, str)
                else json.dumps(tool_input, ensure_ascii=False)
            )
            yield "tool", f"tool {turn['name']}({tool_input})", turn["text"]
        else:
            suffix = " (cut)" if turn["role"] == "model" and not turn["stop"] else ""
            yield (
                turn["role"],
                turn["role"] + (suffix if turn.get("truncated") else ""),
                turn["text"],
            )


def describe_row(sample: Sample, document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of each key of the row but the prompt, the gold answer first.

    `document` is that of the job, which names these keys.
    """
    reward, row = document.get("reward", {}), sample["row"] or {}
    options = [part.get("options", {}) for part in (reward, *reward.get("parts", []))]
    golds = {str(option.get("answer", "answer")).partition(".")[0] for option in options}
    prompt = str(document.get("dataset", {}).get("prompt", "prompt")).partition(".")[0]
    for key in sorted(row, key=lambda key: key not in golds):
        if key != prompt:
            value = row[key]
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            shown = text if len(text) <= MAX_CELL_CHARS else f"{text[:MAX_CELL_CHARS]}..."
            yield f"gold {key}" if key in golds else f"row {key}", shown


def select_evaluations(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of the first and the last two evaluations."""
    found = [s for s in samples if s.get("evaluation")]
    tags = list(dict.fromkeys(s["evaluation"] for s in found))
    return [s for s in found if s["evaluation"] in {*tags[:1], *tags[-2:]}]


def make_table_rows(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return a row for each sample, for trackers: set, reason, prompt, turns and reward."""
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
