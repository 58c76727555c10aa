"""NVIDIA GPUs of this host through NVML: devices, selection, and readings."""
