"""Selection of the host's devices that this process may use.

The module respects what Slurm, Kubernetes or a user has set. `CUDA_VISIBLE_DEVICES` is read as CUDA
reads it, except that an invalid name is an error: CUDA would silently ignore it and all names after
it. `NVIDIA_VISIBLE_DEVICES` is for the container runtime, which has applied it. If the runtime
could not (a privileged container lists all GPUs of the host), it applies here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from meshrl.common.base.errors import ConfigError
from meshrl.common.hardware.gpus.devices import Device

CUDA_ENV, CONTAINER_ENV, ORDER_ENV = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
)
BY_BUS = "PCI_BUS_ID"  # the driver's order
# `void`: CDI has added the devices, and prevents a second addition.
UNRESTRICTED = ("", "all", "void")
_NUMBER = re.compile(r"[+-]?\d+")  # CUDA reads "1gpu" as 1
_PART = re.compile(r"(?P<gpu>GPU-[^/]+)/(?P<gi>\d+)/(?P<ci>\d+)")  # format of drivers before R470


def select_visible(devices: Sequence[Device], environment: Mapping[str, str]) -> list[Device]:
    """Return the devices to compute on, in the order of their names.

    `devices` are all that the driver lists, GPUs by index, each followed by its instances. A GPU in
    MIG mode is replaced by its instances. For an empty result see `explain_no_devices`. ConfigError
    for a name that matches none or several devices, is repeated, or names a lost device.
    """
    requested = environment.get(CUDA_ENV)
    found = list(devices) if requested is None else _select_named(devices, requested, environment)
    allowed = _select_allowed(devices, environment.get(CONTAINER_ENV, ""))
    candidates = [device for device in found if not device.is_mig_enabled and device in allowed]
    if requested is not None:
        for device in candidates:
            if device.lost_reason:
                raise _rejection(
                    requested, f"{device.label}: {device.lost_reason}", "Remove it from the list"
                )
    return [device for device in candidates if not device.lost_reason]


def explain_no_devices(devices: Sequence[Device], environment: Mapping[str, str]) -> str:
    """Return why `select_visible` found no devices."""
    reasons = [
        f"{name}={environment[name]!r}" for name in (CUDA_ENV, CONTAINER_ENV) if name in environment
    ]
    if lost := [
        f"{device.label}: {device.lost_reason}" for device in devices if device.lost_reason
    ]:
        reasons.append("lost: " + "; ".join(lost))
    bare = [d for d in devices if d.is_mig_enabled and not any(o.parent == d.uuid for o in devices)]
    if bare:
        reasons.append("in MIG mode without an instance: " + ", ".join(d.label for d in bare))
    count = sum(not device.parent for device in devices)
    return f"the driver lists {count} GPUs" + (f" ({'; '.join(reasons)})" if reasons else "")


def _select_named(
    devices: Sequence[Device], requested: str, environment: Mapping[str, str]
) -> list[Device]:
    found: list[Device] = []
    numbered = False
    for word in (part.strip() for part in requested.split(",")):
        number = _NUMBER.match(word)
        if number is not None and int(number[0]) >= 0:
            gpus = {device.index: device for device in devices if not device.parent}
            if int(number[0]) not in gpus:
                why = f"there is no GPU {int(number[0])}; the driver lists {len(gpus)}"
                fix = "Correct it: CUDA would drop it and all later entries"
                raise _rejection(requested, why, fix)
            chosen = _expand_mig(devices, gpus[int(number[0])])
            numbered = True
        elif word.startswith(("GPU-", "MIG-")):
            fits = _match_uuid(devices, word)
            if len(fits) != 1:
                several = f"{word} fits {len(fits)} devices: {', '.join(d.uuid for d in fits)}"
                why = several if fits else f"the driver lists no {word}"
                raise _rejection(requested, why, "Run `nvidia-smi -L` to list the devices")
            chosen = _expand_mig(devices, fits[0])
        else:  # -1, NoDevFiles (Slurm's value for none), empty: CUDA ends the list here
            break
        if any(device in found for device in chosen):
            raise _rejection(
                requested,
                f"{word} is listed twice",
                "List it once: CUDA would find no device at all",
            )
        found += chosen
    if numbered:
        _check_order(devices, found, requested, environment)
    return found


def _expand_mig(devices: Sequence[Device], device: Device) -> list[Device]:
    """Return a device, or the instances of a GPU in MIG mode."""
    if not device.is_mig_enabled:
        return [device]
    return [one for one in devices if one.parent == device.uuid]


def _check_order(
    devices: Sequence[Device],
    selected: Sequence[Device],
    requested: str,
    environment: Mapping[str, str],
) -> None:
    """Raise ConfigError if the order of device numbers is ambiguous.

    By default CUDA numbers the fastest GPU first, the driver and Slurm number by bus. Numbers are
    ambiguous if GPUs differ and some are left out.
    """
    gpus = [device for device in devices if not device.parent]
    every = {device.gpu_uuid for device in selected} == {gpu.uuid for gpu in gpus}
    is_homogeneous = len({gpu.name for gpu in gpus}) <= 1
    if not (every or is_homogeneous or environment.get(ORDER_ENV) == BY_BUS):
        names = ", ".join(gpu.label for gpu in gpus)
        raise _rejection(
            requested,
            f"its numbers may follow speed or bus order, and these GPUs differ: {names}",
            f"Set {ORDER_ENV}={BY_BUS} (Slurm's order), or list UUIDs",
        )


def _select_allowed(devices: Sequence[Device], requested: str) -> Sequence[Device]:
    """Return the devices that the container was given.

    Its numbers are the host's, and apply only if the runtime lists the other devices too.
    """
    words = [word.strip() for word in requested.split(",") if word.strip()]
    if requested in UNRESTRICTED or any(word.startswith("/") for word in words):
        return devices  # /var/run/...: devices are passed as mounts
    if words == ["none"]:
        return []
    by_name = [word for word in words if word.startswith(("GPU-", "MIG-"))]
    if by_name:
        chosen = [device for name in by_name for device in _match_uuid(devices, name)]
    elif sum(not device.parent for device in devices) > len(words):
        chosen = []
        for word in words:  # a GPU's index, or GPU:INSTANCE
            gpu, _, instance = word.partition(":")
            there = [d for d in devices if not d.parent and str(d.index) == gpu]
            if instance and there:
                there = [device for device in devices if device.parent == there[0].uuid]
                there = there[int(instance) : int(instance) + 1] if instance.isdigit() else []
            chosen += there
    else:
        return devices
    return [device for one in chosen for device in _expand_mig(devices, one)]


def _match_uuid(devices: Sequence[Device], name: str) -> list[Device]:
    """Return the devices with a UUID, a UUID prefix, or MIG-GPU-<uuid>/<instance>/<compute>."""
    part = _PART.fullmatch(name.removeprefix("MIG-"))
    if part is None:
        return [device for device in devices if device.uuid.startswith(name)]
    numbers = int(part["gi"]), int(part["ci"])
    return [d for d in devices if d.parent.startswith(part["gpu"]) and d.instance == numbers]


def _rejection(requested: str, reason: str, fix: str) -> ConfigError:
    return ConfigError(f"{CUDA_ENV}={requested!r}: {reason}", where=CUDA_ENV, fix=fix)
