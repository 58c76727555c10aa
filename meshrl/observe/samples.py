"""`meshrl samples`: the trajectories that a run has kept to be read; see `services/rollout/samples`.

Read from the files of the run's shards, while it goes on and after it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from common.errors import NotFound
from meshrl.launch.places import existing_run

Sample = dict[str, Any]
LOOK_S = 0.5  # between two looks for what is new
STYLES = {"prompt": "dim", "model": "cyan", "tool": "yellow", "environment": "green"}
ORDERS = ("best", "worst", "failed")


def show(
    run: Path, step: int | None, order: str, most: int, follow: bool, as_json: bool
) -> int:
    """Prints samples of a run; the exit status. NotFound when it has none and is not followed."""
    run_dir = existing_run(run)
    found = [s for s in read(run_dir) if step is None or s["step"] == step]
    if not found and not follow:
        of = "" if step is None else f" of step {step}"
        raise NotFound(
            f"{run} has no samples{of} yet",
            fix="they come as trajectories end; --follow waits for them",
        )
    console = Console(highlight=False, soft_wrap=True)
    for sample in chosen(found, order, most):
        _print(console, sample, as_json)
    if follow:
        try:
            for sample in followed(run_dir):
                if (step is None or sample["step"] == step) and fits(sample, order):
                    _print(console, sample, as_json)
        except KeyboardInterrupt:
            return 0
    return 0


def files(run_dir: Path) -> list[Path]:
    """The files that shards write."""
    return sorted(run_dir.glob("samples*.jsonl"))


def read(run_dir: Path) -> list[Sample]:
    """All samples of a run, oldest first; a line that is being written is left for later."""
    found = [sample for path in files(run_dir) for sample in parsed(path.read_bytes())]
    return sorted(found, key=lambda sample: float(sample["at"]))


def parsed(content: bytes) -> Iterator[Sample]:
    """The whole lines of a file; one that a crash has cut short is left out."""
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def followed(run_dir: Path) -> Iterator[Sample]:
    """What comes from now on, for ever."""
    read_to = {path: path.stat().st_size for path in files(run_dir)}
    while True:
        for path in files(run_dir):
            if path.name.endswith(".older.jsonl"):
                continue
            at, size = read_to.get(path, 0), path.stat().st_size
            at = at if at <= size else 0  # it has started again
            with path.open("rb") as file:
                file.seek(at)
                content = file.read()
            content = content[: content.rfind(b"\n") + 1]
            read_to[path] = at + len(content)
            yield from parsed(content)
        time.sleep(LOOK_S)


def chosen(samples: Sequence[Sample], order: str, most: int) -> list[Sample]:
    """The last ones, or the best, the worst or the last that failed; of several that are alike the
    newest. The one that matters most comes last, next to the prompt of the shell.
    """
    fitting = [s for s in samples if fits(s, order)]
    if order in ("best", "worst"):
        sign = 1 if order == "best" else -1
        fitting.sort(key=lambda s: (sign * s["reward"], s["at"]))
    return fitting[-most:] if most > 0 else []


def fits(sample: Sample, order: str) -> bool:
    """Whether it is one of those asked for: failed ones have no reward, so they are no worst."""
    return order == "" or (sample["reward"] is None) == (order == "failed")


def _print(console: Console, sample: Sample, as_json: bool) -> None:
    if as_json:
        print(json.dumps(sample), flush=True)
        return
    console.print(Text(heading(sample), style="bold red" if sample["error"] else "bold"))
    for role, title, text in parts(sample):
        label = Text(f"{title}: ", style=f"bold {STYLES[role]}")
        console.print(label.append(Text(text, style=STYLES[role])))
    console.print()
    sys.stdout.flush()


def heading(sample: Sample) -> str:
    """What there is to know of a sample in one line."""
    where = f"evaluation {sample['evaluation']}, " if sample.get("evaluation") else ""
    reward = "no reward" if sample["reward"] is None else f"reward {sample['reward']:.3f}"
    versions = sample["versions"]
    span = "-".join(str(v) for v in dict.fromkeys(versions)) or "none"
    parts = [
        f"step {sample['step']}",
        f"{where}{sample['set']}, group {sample['group']}.{sample['member']}",
        reward,
        ended(sample),
        f"{sample['tokens']} tokens, {sample['sampled']} sampled",
        f"version {span}, staleness {sample['staleness']}",
        "/".join(sample["why"]),
    ]
    return " | ".join(parts)


def ended(sample: Sample) -> str:
    """Why it ended."""
    if sample["error"]:
        return f"{sample['failure'] or sample['ending']}: {sample['error']}"
    known = {"length": "cut at rollout.max_tokens", "turns": "cut at rollout.max_turns"}
    return known.get(sample["ending"], sample["ending"])


def parts(sample: Sample) -> Iterator[tuple[str, str, str]]:
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
