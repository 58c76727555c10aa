"""GPU readings of the driver, through NVML's own library interface."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import pynvml
import pytest

from tests.gpus.driver import DRIVER_NOT_LOADED, GIB, LOST, NO_SUPPORT, VERSION_MISMATCH, Gpus

A, B = (f"GPU-{letter}{'1' * 7}-0000-0000-0000-000000000000" for letter in "ab")
M1, M2 = (f"MIG-{number}0000000-0000-0000-0000-000000000000" for number in (1, 2))
UNUSED_PID = 1 << 22  # above the highest possible pid
pytestmark = pytest.mark.needs("compiler")
READ_ALL = """
import json, sys
from dataclasses import asdict
from meshrl.common.hardware.gpus import nvml
with nvml.open_driver() as opened:
    devices = opened.list_devices()
    said = {d.label: opened.read(d).to_document() for d in devices if d.uuid}
    print(json.dumps({
        "devices": [asdict(d) for d in devices],
        "readings": said,
        "memory": {
            d.uuid: m and asdict(m) for d in devices if d.uuid for m in [opened.read_memory(d.uuid)]
        },
    }))
assert "torch" not in sys.modules
"""


def test_fake_structures_match_nvidias_bindings(gpus: Gpus) -> None:
    """Check that the fake library's structures have the sizes that NVIDIA publishes."""
    library = ctypes.CDLL(str(Path(gpus.environment["LD_LIBRARY_PATH"]) / "libnvidia-ml.so.1"))
    nvidia_structures = (
        pynvml.c_nvmlMemory_t,
        pynvml.c_nvmlUtilization_t,
        pynvml.c_nvmlProcessInfo_v3_t,
        pynvml.c_nvmlEventData_t,
    )
    sizes = [library.structure_sizes(index) for index in range(len(nvidia_structures))]
    assert sizes == [ctypes.sizeof(structure) for structure in nvidia_structures]


def test_gpus_and_instances_are_listed_with_their_readings(gpus: Gpus) -> None:
    gpus.gpu(
        A, used=10 * GIB, busy=97, celsius=71, milliwatts=650_500, ecc=3, throttle=0x25, mig=-1
    )
    gpus.gpu(B, total="-", celsius=NO_SUPPORT, ecc=NO_SUPPORT, throttle=NO_SUPPORT, mig=1)
    gpus.instance(B, M1, 7, used=GIB)
    gpus.instance(B, M2, 9, ci=1)
    gpus.process(A, os.getpid(), 6 * GIB)
    gpus.process(A, UNUSED_PID, NO_SUPPORT)
    output = json.loads(gpus.run(READ_ALL))
    assert [device["uuid"] for device in output["devices"]] == [A, B, M1, M2]
    assert output["devices"][3]["instance"] == [9, 1] and output["devices"][3]["parent"] == B
    assert output["devices"][1]["is_mig_enabled"] and output["devices"][1]["memory_bytes"] == 0
    assert output["readings"]["cuda:0 NVIDIA H100"] == {
        "used": 10 * GIB,
        "total": 80 * GIB,
        "utilization": 0.97,
        "temperature_c": 71,
        "power_w": 650.5,
        "ecc_uncorrected": 3,
        "throttled": ["power_cap", "thermal"],  # 0x1 is idle, which is not a fault
    }
    # An instance has its own memory; power is its GPU's, and this GPU reports no temperature.
    assert output["readings"]["cuda:1/7/0 NVIDIA H100 MIG 1g.10gb"] == {
        "used": GIB,
        "total": 10 * GIB,
        "power_w": 70.0,
    }
    assert output["memory"][A]["free_bytes"] == 70 * GIB and output["memory"][B] is None
    assert output["memory"][A]["processes"] == [
        {
            "pid": os.getpid(),
            "used_bytes": 6 * GIB,
            "name": Path("/proc/self/cmdline").read_text().split("\0")[0],
        },
        {"pid": UNUSED_PID, "used_bytes": None, "name": ""},
    ]


def test_lost_gpu_is_listed_with_the_others(gpus: Gpus) -> None:
    gpus.gpu(A)
    gpus.gpu(B)
    gpus.fail(A, LOST)
    output = json.loads(gpus.run(READ_ALL))
    lost_gpu, working_gpu = output["devices"]
    assert (
        "GPU is lost" in lost_gpu["lost_reason"]
        and working_gpu["uuid"] == B
        and not working_gpu["lost_reason"]
    )


def test_xid_errors_are_reported_once(gpus: Gpus) -> None:
    gpus.gpu(A)
    gpus.xid(A, 79)
    code = """
import os
from meshrl.common.hardware.gpus import nvml
with nvml.open_driver() as opened, opened.watch_errors(opened.list_devices()) as news:
    print(news(), news())
    open(os.environ["NVML_TABLE"], "a").write("xid|%s|48\\n")
    print(news(), news())
"""
    assert gpus.run(code % A).splitlines() == [f"[('{A}', 79)] []", f"[('{A}', 48)] []"]


@pytest.mark.parametrize(
    ("code", "why"),
    [(DRIVER_NOT_LOADED, "kernel module is not loaded"), (VERSION_MISMATCH, "different versions")],
)
def test_unavailable_driver_error_has_the_reason(gpus: Gpus, code: int, why: str) -> None:
    gpus.fail_init(code)
    assert why in gpus.run(NO_DRIVER)


NO_DRIVER = """
from meshrl.common.hardware.gpus import nvml
try:
    with nvml.open_driver():
        raise SystemExit("it answers")
except nvml.NoDriver as error:
    print(error)
"""


def test_host_without_a_driver_raises_no_driver(gpus: Gpus, tmp_path: Path) -> None:
    output = gpus.run(NO_DRIVER, LD_LIBRARY_PATH=str(tmp_path))
    assert "libnvidia-ml.so.1" in output or sys.platform != "linux"
