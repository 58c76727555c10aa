"""What HeterMoE is compared with, in tokens a second; memory is no limit to any of them but for
pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshrl.common.hardware.zebra.batches import checked, spread
from meshrl.common.hardware.zebra.costs import BACKWARD
from meshrl.common.hardware.zebra.profile import AcceleratorCosts, Profile
from meshrl.common.hardware.zebra.shapes import CoreShape, costs_of
from meshrl.common.hardware.zebra.timeline import serial_s
from meshrl.common.hardware.zebra.together import all_to_all_s, expert_parallel_s, reduced_s

MICROS = (1, 2, 3, 4, 6, 8)


def expert_parallel(
    profile: Profile, lengths: Mapping[int, int], kinds: Sequence[AcceleratorCosts], ranks: int
) -> float:
    """Experts over all of so many accelerators, as evenly as if they always divided."""
    steps = (expert_parallel_s(profile, lengths, kinds, ranks, ranks, micros) for micros in MICROS)
    return checked(lengths) / min(step_s for step_s in steps if step_s is not None)


def ideal(profile: Profile, lengths: Mapping[int, int], fast: int, slow: int) -> float:
    """Both kinds by themselves, added up."""
    alone = expert_parallel(profile, lengths, [profile.fast], fast)
    return alone + expert_parallel(profile, lengths, [profile.slow], slow)


def disaggregated(profile: Profile, lengths: Mapping[int, int], shape: CoreShape) -> float:
    """DistEP: divided like `shape`, with nothing hosted and nothing at once."""
    batches = spread(lengths, shape.attention, profile.attention)
    assert batches is not None
    costs, _ = costs_of(profile, shape.ranks, batches)
    summed = shape.step_s - shape.timeline.makespan
    return checked(lengths) / (serial_s(profile.layers, 1, costs) + summed)


def pipeline(profile: Profile, lengths: Mapping[int, int], fast: int, slow: int) -> float | None:
    """Whole layers on either kind, as many as its speed is worth: the best of all widths, numbers
    of layers and orders of kinds. Ranks of a stage divide its experts among them, and their
    all-to-all is not hidden; what goes from stage to stage costs nothing.
    """
    steps = list(_pipelines(profile, lengths, fast, slow))
    return checked(lengths) / min(steps) if steps else None


def _pipelines(
    profile: Profile, lengths: Mapping[int, int], fast: int, slow: int
) -> Iterator[float]:
    """Seconds of a step, 1F1B: all stages once, and the slowest for every other micro-batch."""
    count, tokens = sum(lengths.values()), checked(lengths)
    for width in range(1, min(fast, slow) + 1):
        if fast % width or slow % width or count % width:
            continue
        stages = fast // width, slow // width
        micros = count // width
        each = [_layer_s(profile, lengths, kind, width, micros) for kind in _kinds(profile)]
        each_head = tokens / (width * micros)
        curves = [kind.head for kind in _kinds(profile) if kind.head is not None]
        heads = [curve.of(each_head) * (1 + BACKWARD) for curve in curves]
        shared = reduced_s(profile, profile.attention_gradient_bytes, width)
        for layers in range(stages[0], profile.layers - stages[1] + 1):
            parts = layers, profile.layers - layers
            layer = profile.experts * profile.expert_bytes / width  # on a rank
            each_part = zip(parts, stages, _kinds(profile), strict=True)
            if any(-(-n // of) * layer > kind.memory_bytes for n, of, kind in each_part):
                continue
            for last in (0, 1):
                slowest = max(-(-parts[i] // stages[i]) * each[i] for i in (0, 1))
                end = parts[last] // stages[last] * each[last] + heads[last]
                whole = parts[0] * each[0] + parts[1] * each[1] + heads[last]
                yield whole + (micros - 1) * max(slowest, end) + shared


def _kinds(profile: Profile) -> tuple[AcceleratorCosts, AcceleratorCosts]:
    return profile.fast, profile.slow


def _layer_s(
    profile: Profile, lengths: Mapping[int, int], kind: AcceleratorCosts, width: int, micros: int
) -> float:
    """A micro-batch forward and backward through a layer."""
    assert kind.attention is not None
    batches = spread(lengths, width * micros, kind.attention)
    assert batches is not None
    rows = batches.tokens * profile.experts_per_token
    compute = batches.seconds(kind.attention) + kind.experts.of(rows)
    sent = all_to_all_s(profile, batches.tokens * (width - 1) / width)
    return compute * (1 + profile.backward) + 4 * sent
