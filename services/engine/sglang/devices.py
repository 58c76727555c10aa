"""Names of the GPUs that an SGLang server sees.

SGLang parses `CUDA_VISIBLE_DEVICES` as integers, and uses them as indexes of NVML: in its custom
all-reduce, its quick all-reduce and its check of NVLink fabrics. With UUIDs, which MeshRL's workers
have, a server of several ranks fails there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshrl.common.hardware.gpus.devices import Device
from meshrl.common.hardware.gpus.nvml import open_driver
from meshrl.common.hardware.gpus.visibility import BY_BUS, CUDA_ENV, ORDER_ENV, select_visible


@dataclass(frozen=True)
class VisibleDevices:
    """Environment that names the devices of a server, and if SGLang can parse it."""

    environment: Mapping[str, str] = field(default_factory=dict)  # empty: as inherited
    has_only_uuids: bool = False  # MIG instances, which have no index

    def build_flags(self) -> list[str]:
        return ["--disable-custom-all-reduce"] if self.has_only_uuids else []


def name_by_index(devices: Sequence[Device], environment: Mapping[str, str]) -> VisibleDevices:
    """Name the devices that `environment` makes visible by their index in the bus's order."""
    visible = select_visible(devices, environment)
    if any(device.parent for device in visible):
        return VisibleDevices(has_only_uuids=True)
    indexes = ",".join(str(device.index) for device in visible)
    return VisibleDevices({CUDA_ENV: indexes, ORDER_ENV: BY_BUS})


def read_visible_devices(environment: Mapping[str, str]) -> VisibleDevices:
    """Read the devices of this host from the driver, which may block; raise NoDriver."""
    with open_driver() as driver:
        return name_by_index(driver.list_devices(), environment)
