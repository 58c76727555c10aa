"""Texts about a run's steps and evaluations, for lines and for the live view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshrl.common.job.evaluation_plan import GREEDY, LOSS, LOSS_METRIC, NAMED_APART, SAMPLED
from meshrl.view.health.run_figures import compute_truncated_share
from meshrl.view.history.job_failures import explain_unscored, format_figures, format_share
from meshrl.view.history.run_snapshot import Evaluation, RunSnapshot
from meshrl.view.mesh.worker_lines import WorkerLine


def format_duration(seconds: float) -> str:
    """Return h:mm:ss, or m:ss below an hour."""
    whole_s = int(seconds)
    hours, minutes = divmod(whole_s // 60, 60)
    return f"{hours}:{minutes:02}:{whole_s % 60:02}" if hours else f"{minutes}:{whole_s % 60:02}"


def format_step(row: dict[str, Any], snapshot: RunSnapshot) -> str:
    """Return the line of a step: the figures of its row, and the speed and workers of now."""
    rate = (
        f"{snapshot.rollout_tokens_per_s / 1000:.1f}k rolled out "
        f"{snapshot.trained_tokens_per_s / 1000:.1f}k trained"
    )
    learned = f"reward {row['reward']:.3f}  spread {format_value(row.get('reward_spread'))}"
    learned += f"  length {row['length_mean']:.0f}"
    learned += f"  truncated {format_percent(compute_truncated_share(row))}"
    learned += f"  staleness {row['staleness']:.2f}  gap {format_gap(row['logprob_gap'])}"
    if snapshot.is_supervised:
        learned = f"loss {row['loss']:.4f}"
        if (held_out := row.get(LOSS_METRIC)) is not None:
            learned += f"  held-out loss {held_out:.4f}"
        learned += f"  grad norm {row['grad_norm']:.2g}  length {row['length_mean']:.0f}"
        rate = f"{snapshot.trained_tokens_per_s / 1000:.1f}k trained"
    return (
        f"[{format_duration(snapshot.elapsed_s)}] step {row['step']}/{snapshot.steps}  {learned}"
        f"  failed {format_percent(row.get('failed_share', 0.0))}"
        f"  tokens/s {rate}  {format_roles(snapshot.worker_lines, snapshot.job)}"
    )


def format_value(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def format_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def format_gap(value: float | None) -> str:
    """Return the gap; None means no token of the step had its whole prefix from one version."""
    return "-" if value is None else f"{value:.1e}"


def format_evaluation(evaluation: Evaluation) -> str:
    """Return the line of an evaluation."""
    shares, held_out = evaluation.scored_shares, format_held_out(evaluation)
    parts = [held_out] if held_out else []
    parts += [others] if (others := format_other_figures(evaluation)) else []
    parts += [missing] if (missing := explain_unscored(shares, evaluation.unscored_reasons)) else []
    best = "; the best so far" if evaluation.is_best else ""
    what = "held-out" if held_out else "evaluated"
    stop = evaluation.early_stop
    end = f"; the run ends after step {stop.step}: {stop.reason}" if stop else ""
    return f"{what} after step {evaluation.step}: {', '.join(parts) or 'no figure'}{best}{end}"


def format_held_out(evaluation: Evaluation) -> str:
    """Return the figures of the held-out set: rewards, and the loss of a supervised job."""
    parts, shares = [], evaluation.scored_shares
    if evaluation.sampled_reward is not None:
        parts.append(f"{evaluation.sampled_reward:.3f} sampled{format_share(shares.get(SAMPLED))}")
    if evaluation.greedy_reward is not None:
        parts.append(f"{evaluation.greedy_reward:.3f} greedy{format_share(shares.get(GREEDY))}")
    if LOSS in evaluation.figures:
        parts.append(f"loss {evaluation.figures[LOSS]:.4f}")
    return ", ".join(parts)


def format_other_figures(evaluation: Evaluation) -> str:
    """Return the figures without those of the held-out set that have short names."""
    others = {k: v for k, v in evaluation.figures.items() if k not in NAMED_APART}
    return format_figures(others, evaluation.scored_shares)


def format_roles(workers: Sequence[WorkerLine], job: str) -> str:
    """Return `w0:training w1:rollout`, of the workers that serve the job."""
    return " ".join(f"{w.worker}:{w.role}" for w in workers if w.instance and w.job == job)


def format_point(e: Evaluation) -> str:
    """Return the figures of the held-out set, for a line with those of other versions."""
    parts = []
    if e.sampled_reward is not None:
        parts.append(f"{e.sampled_reward:.3f}{format_share(e.scored_shares.get(SAMPLED))}")
    if e.greedy_reward is not None:
        parts.append(f"({e.greedy_reward:.3f} greedy)")
    if LOSS in e.figures:
        parts.append(f"loss {e.figures[LOSS]:.4f}")
    return " ".join(parts)
