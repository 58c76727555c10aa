"""A gang that trains a mixture, its tasks and transfers padded to declared accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.profiles import CPU, kind_of
from meshrl.common.hardware.shapes import ModelShape
from meshrl.common.hardware.zebra.costs import BACKWARD, CHECKPOINTED
from meshrl.common.hardware.zebra.kinds import declared_profile
from meshrl.common.hardware.zebra.profile import AcceleratorCosts, CostCurve, Profile
from meshrl.common.hardware.zebra.schedule import TaskKind
from meshrl.common.hardware.zebra.together import passes_s
from meshrl.common.job.bundle.job_data import JobData
from meshrl.common.job.bundle.model_shape import model_config
from meshrl.common.job.pace import LATE, declared_pace


@dataclass
class ZebraPace:
    """A rank's pace: its accelerator's `kind`, and what `tokens` a real one stands for."""

    profile: Profile
    kind: AcceleratorCosts
    tokens: float = 1.0
    paced: int = field(default=0, init=False)  # tasks and transfers so far
    late: int = field(default=0, init=False)  # of them, that took longer than their pace

    def task_s(self, work: TaskKind, backward: bool, sizes: Sequence[float]) -> float:
        """Seconds of a task: of attention on such sequences, or of experts that get such rows."""
        curve = self.kind.attention if work is TaskKind.ATTENTION else self.kind.experts
        times = self.profile.backward if backward else 1.0
        return times * self._of(curve, sizes)

    def head_s(self, tokens: float, goes_back: bool) -> float:
        """Of the last piece, which goes back at once if it does."""
        return (1.0 + BACKWARD * goes_back) * self._of(self.kind.head, [tokens])

    def transfer_s(self, rows: int) -> float:
        """Of a transfer in which a rank gives so many rows."""
        seconds = rows * self.tokens * self.profile.row_bytes / self.profile.link_bytes_per_s
        return self.profile.link_latency_s + seconds

    def bin_s(self, lengths: Sequence[float], degree: int, back: bool = True) -> float:
        """Seconds of a bin, and `back`, on a rank like all others with experts over `degree`."""
        profile, tokens = self.profile, sum(lengths)
        rows = tokens * profile.experts_per_token * degree / profile.experts
        layer = self._of(self.kind.attention, lengths)
        layer += profile.experts / degree * self._of(self.kind.experts, [rows])
        head = self._of(self.kind.head, [tokens])
        return passes_s(profile, layer, head, self.tokens * tokens, degree, back)

    def took(self, wanted_s: float, took_s: float) -> None:
        """Something that was to take so long has ended."""
        self.paced += 1
        self.late += took_s > (1.0 + LATE) * wanted_s

    @property
    def counts(self) -> dict[str, int]:
        return {"paced": self.paced, "late": self.late}

    def _of(self, curve: CostCurve | None, sizes: Sequence[float]) -> float:
        assert curve is not None, "it is known of the kind of ranks with attention"
        return sum(curve.of(self.tokens * size) for size in sizes)


def pace_of(data: JobData, accelerator: str) -> ZebraPace | None:
    """The pace of a rank on an accelerator of this name, in real seconds; None where the job has
    its ranks compute as fast as they can. ConfigError for an accelerator of no declared kind.
    """
    training = data.config.training
    pace = declared_pace(training.pace)
    if pace is None:
        return None
    kind = kind_of(accelerator)
    if kind in ("", CPU):
        raise ConfigError(
            f"training.pace is that of declared accelerators, and a rank is on {accelerator}",
            where="training.pace",
            fix="say what CPU slots stand for, as MESHRL_STAND_FOR=A40,A40,V100, when they start",
        )
    shape = ModelShape.of(model_config(data))
    profile = declared_profile(shape, kind, kind)
    again = CHECKPOINTED if training.activation_checkpointing else BACKWARD
    profile = replace(profile, backward=again).slowed(pace.scale)
    return ZebraPace(profile, profile.fast, pace.tokens)
