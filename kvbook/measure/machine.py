"""What the program runs on.

Knows: names, versions, sizes of memory and of the last-level cache. Does not know: how fast
anything is.
"""

import datetime
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from kvbook.model.target import usable_device

CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
KIB = {"K": 1, "M": 1024, "G": 1024**2}


def last_level_cache(device: torch.device | str = "cpu") -> int | None:
    """Bytes of the largest cache before main memory; ``None`` if the system does not say.

    CPU: the highest level that Linux lists for core 0, as a virtual machine shows it. CUDA: L2.
    """
    device = usable_device(device)
    if device.type == "cpu":
        return cpu_last_level(CPU_CACHES)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return None


def cpu_last_level(folder: Path) -> int | None:
    """The largest data cache below ``folder``, which is laid out as Linux does it."""
    sizes = [
        _bytes((index / "size").read_text())
        for index in folder.glob("index*")
        if (index / "type").read_text().strip() != "Instruction"
    ]
    return max(sizes, default=None)


def _bytes(text: str) -> int:
    """Linux writes ``32768K``."""
    match = re.fullmatch(r"(\d+)([KMG])", text.strip())
    if match is None:
        raise ValueError(f"a cache size must look like 32768K, got {text!r}")
    return int(match[1]) * KIB[match[2]] * 1024


def memory_of(device: torch.device | str = "cpu") -> int | None:
    """Bytes of main memory; ``None`` if the system does not say."""
    device = usable_device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "cpu" and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def device_name(device: torch.device | str = "cpu") -> str:
    """The name of the processor or accelerator."""
    device = usable_device(device)
    if device.type == "cpu":
        return _cpu_name(Path("/proc/cpuinfo"))
    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else device.type


def _cpu_name(cpuinfo: Path) -> str:
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a number taken now was taken on: plain values that JSON can hold."""
    return {
        "device": device_name(device),
        "device_type": usable_device(device).type,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": str(torch.__version__),
        # "highest" is full float32; "high" and "medium" let an accelerator round its inputs.
        "float32_precision": torch.get_float32_matmul_precision(),
        "python": platform.python_version(),
        "system": platform.system(),
        "last_level_cache_bytes": last_level_cache(device),
        "date": datetime.date.today().isoformat(),
    }
