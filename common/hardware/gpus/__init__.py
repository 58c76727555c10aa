"""GPUs as NVIDIA's driver tells of them, by NVML: which there are, which are ours, how they do."""
