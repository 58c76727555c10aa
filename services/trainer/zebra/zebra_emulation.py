"""Emulation of a gang that trains an MoE model: tasks and transfers padded to declared speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.accelerators import CPU, match_kind
from meshrl.common.hardware.model_shapes import ModelShape
from meshrl.common.hardware.zebra.costs import BACKWARD_FACTOR, CHECKPOINTED_BACKWARD_FACTOR
from meshrl.common.hardware.zebra.declared_profiles import build_declared_profile
from meshrl.common.hardware.zebra.expert_parallel import compute_passes_s
from meshrl.common.hardware.zebra.profile import AcceleratorCosts, CostCurve, MixtureProfile
from meshrl.common.hardware.zebra.schedule import TaskKind
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import load_model_config
from meshrl.common.job.emulation import LATE_SHARE, parse_emulation_scale


@dataclass
class ZebraEmulation:
    """Emulated speed of a rank: its accelerator's costs, and emulated tokens per computed token."""

    profile: MixtureProfile
    costs: AcceleratorCosts
    token_scale: float = 1.0
    emulated_steps: int = field(default=0, init=False)  # tasks and transfers so far
    late_steps: int = field(default=0, init=False)  # those that took longer than emulated

    def predict_task_s(self, work: TaskKind, backward: bool, sizes: Sequence[float]) -> float:
        """Return the seconds of a task: attention on such sequences, or experts with such rows."""
        curve = self.costs.attention if work is TaskKind.ATTENTION else self.costs.experts
        times = self.profile.backward if backward else 1.0
        return times * self._sum_curve_s(curve, sizes)

    def predict_head_s(self, tokens: float, with_backward: bool) -> float:
        """Return the seconds of the last piece, with its backward pass if it runs at once."""
        return (1.0 + BACKWARD_FACTOR * with_backward) * self._sum_curve_s(
            self.costs.head, [tokens]
        )

    def predict_transfer_s(self, rows: int) -> float:
        """Return the seconds of a transfer in which a rank sends this many rows."""
        seconds = rows * self.token_scale * self.profile.row_bytes / self.profile.link_bytes_per_s
        return self.profile.link_latency_s + seconds

    def predict_bin_s(
        self, lengths: Sequence[float], expert_parallel: int, with_backward: bool = True
    ) -> float:
        """Return the seconds of a bin on a uniform rank; experts are over `expert_parallel`
        ranks.
        """
        profile, tokens = self.profile, sum(lengths)
        rows = tokens * profile.experts_per_token * expert_parallel / profile.experts
        layer = self._sum_curve_s(self.costs.attention, lengths)
        layer += profile.experts / expert_parallel * self._sum_curve_s(self.costs.experts, [rows])
        head = self._sum_curve_s(self.costs.head, [tokens])
        return compute_passes_s(
            profile, layer, head, self.token_scale * tokens, expert_parallel, with_backward
        )

    def record(self, target_s: float, took_s: float) -> None:
        """Record a finished task or transfer with its target time."""
        self.emulated_steps += 1
        self.late_steps += took_s > (1.0 + LATE_SHARE) * target_s

    @property
    def late_counts(self) -> dict[str, int]:
        return {"emulated_count": self.emulated_steps, "late_count": self.late_steps}

    def _sum_curve_s(self, curve: CostCurve | None, sizes: Sequence[float]) -> float:
        assert curve is not None, "the curve of ranks with attention must be known"
        return sum(curve.interpolate_s(self.token_scale * size) for size in sizes)


def build_emulation(data: JobData, accelerator: str) -> ZebraEmulation | None:
    """Return the emulation of a rank on this accelerator, in real seconds; None if not emulated.

    Raise ConfigError for an accelerator of no declared kind.
    """
    training = data.config.training
    pace = parse_emulation_scale(training.emulate)
    if pace is None:
        return None
    kind = match_kind(accelerator)
    if kind in ("", CPU):
        raise ConfigError(
            f"training.emulate needs declared accelerators, and a rank is on {accelerator}",
            where="training.emulate",
            fix="Set the emulated accelerators at the start, as in "
            "MESHRL_EMULATED_ACCELERATORS=A40,A40,V100",
        )
    shape = ModelShape.from_config(load_model_config(data))
    profile = build_declared_profile(shape, kind, kind)
    again = CHECKPOINTED_BACKWARD_FACTOR if training.activation_checkpointing else BACKWARD_FACTOR
    profile = replace(profile, backward=again).scale_time(pace.time_scale)
    return ZebraEmulation(profile, profile.fast, pace.token_scale)
