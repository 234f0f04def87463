"""Machines that are known: peaks from data sheets, memory as the driver reports it.

Knows: the figures and where each comes from. Does not know: what is reached in practice.

Vendors print peaks with and without sparsity; these are without, for dense matrices. GB and TB
are powers of 1000, as vendors write them. A card sold as 80 GB has neither 80 · 10⁹ bytes nor
80 GiB for programs: ``memory`` is what ``nvidia-smi`` or ``rocm-smi`` shows as its total, and on a
Mac, where CPU and GPU share memory, Metal's recommended working set.
"""

from kvbook.accounting.hardware import Hardware
from kvbook.accounting.nearest import hint
from kvbook.accounting.units import quoted

MIB, GB, TB, TERA = 1024**2, 1000**3, 1000**4, 1e12

NVIDIA_SMI = "memory from nvidia-smi"
SMI_TOTALS = f"{NVIDIA_SMI}: https://github.com/modal-labs/modal-client/pull/2797 (2025)"
METAL = "memory from Metal's recommendedMaxWorkingSetSize"
HOPPER = {
    "float32": 67 * TERA, "float16": 989 * TERA, "bfloat16": 989 * TERA, "float8_e4m3": 1979 * TERA,
}  # fmt: skip
AMPERE = {"float32": 19.5 * TERA, "float16": 312 * TERA, "bfloat16": 312 * TERA}

PRESETS = {
    known.name: known
    for known in (
        Hardware(
            "A100-SXM-40GB",
            AMPERE,
            bandwidth=1_555 * GB,
            memory=40_960 * MIB,
            source=f"NVIDIA A100 Tensor Core GPU data sheet (2021); {SMI_TOTALS}",
        ),
        Hardware(
            "A100-SXM-80GB",
            AMPERE,
            bandwidth=2_039 * GB,
            memory=81_920 * MIB,
            source=f"NVIDIA A100 80GB Tensor Core GPU data sheet (2021); {SMI_TOTALS}",
        ),
        Hardware(
            "H100-SXM",
            HOPPER,
            bandwidth=3.35 * TB,
            memory=81_559 * MIB,
            source="NVIDIA H100 Tensor Core GPU data sheet (2023), halved where it counts "
            f"sparsity; {SMI_TOTALS}",
        ),
        Hardware(
            "H200-SXM",
            HOPPER,
            bandwidth=4.8 * TB,
            memory=143_771 * MIB,
            source="NVIDIA H200 Tensor Core GPU data sheet (2023), halved where it counts "
            f"sparsity; {NVIDIA_SMI}",
        ),
        Hardware(
            "B200-SXM",
            {
                "float32": 75 * TERA, "float16": 2250 * TERA, "bfloat16": 2250 * TERA,
                "float8_e4m3": 4500 * TERA,
            },
            bandwidth=7.672 * TB,
            memory=183_359 * MIB,
            source="NVIDIA HGX B200 data sheet (2025), an eighth, halved where it counts sparsity; "
            "bandwidth as the driver's bus width and clock give it, where 8 TB/s was announced: "
            f"https://github.com/pytorch/ao/pull/4002 (2026); {NVIDIA_SMI}: "
            "https://github.com/NVIDIA/TensorRT-LLM/issues/10278 (2025)",
        ),
        Hardware(
            "L40S",
            {
                "float32": 91.6 * TERA, "float16": 362.05 * TERA, "bfloat16": 362.05 * TERA,
                "float8_e4m3": 733 * TERA,
            },
            bandwidth=864 * GB,
            memory=46_068 * MIB,
            source=f"NVIDIA L40S data sheet (2023); {SMI_TOTALS}",
        ),
        Hardware(
            "RTX-4090",
            {"float32": 82.6 * TERA, "float16": 165.2 * TERA, "bfloat16": 165.2 * TERA},
            bandwidth=1.008 * TB,
            memory=24_564 * MIB,
            source="NVIDIA Ada GPU architecture white paper (2022), appendix A, 32-bit "
            f"accumulation; {NVIDIA_SMI}: https://github.com/RLinf/RLinf/issues/255 (2025)",
        ),
        Hardware(
            "RTX-5090",
            {"float32": 104.8 * TERA, "float16": 209.5 * TERA, "bfloat16": 209.5 * TERA},
            bandwidth=1.792 * TB,
            memory=32_607 * MIB,
            source="NVIDIA RTX Blackwell GPU architecture white paper (2025), 32-bit accumulation; "
            f"{NVIDIA_SMI}: https://github.com/noonghunna/club-3090/issues/1229 (2026)",
        ),
        Hardware(
            "MI300X",
            {
                "float32": 163.4 * TERA, "float16": 1307.4 * TERA, "bfloat16": 1307.4 * TERA,
                "float8_e4m3": 2614.9 * TERA,
            },
            bandwidth=5.3 * TB,
            memory=206_141_652_992,
            source="AMD Instinct MI300X accelerator data sheet (2023); memory from rocm-smi: "
            "https://github.com/ROCm/legacy-rocm-build/issues/4750 (2025)",
        ),
        Hardware(
            "MI355X",
            {
                "float32": 157.3 * TERA, "float16": 2516.6 * TERA, "bfloat16": 2516.6 * TERA,
                "float8_e4m3": 5033.2 * TERA,
            },
            bandwidth=8 * TB,
            memory=288 * GB,
            source="AMD Instinct MI355X GPU data sheet (2025), memory too, in units of 1000; what "
            "its driver reports was not found in public",
        ),
    )
}  # fmt: skip

# Machines whose maker states no peaks: memory and bandwidth only.
MACS = {
    known.name: known
    for known in (
        Hardware(
            "M2-Max-32GB",
            {},
            bandwidth=400 * GB,
            memory=22_906_503_168,
            source="Apple's announcement of M2 Pro and M2 Max (2023), which states no peaks by "
            f"dtype; {METAL}, 21,845.34 MiB: https://github.com/ollama/ollama/issues/434 (2023)",
        ),
        Hardware(
            "M2-Max-96GB",
            {},
            bandwidth=400 * GB,
            memory=73_728 * MIB,
            source="Apple's announcement of M2 Pro and M2 Max (2023), which states no peaks by "
            f"dtype; {METAL}: https://github.com/ggml-org/llama.cpp/issues/3213 (2023)",
        ),
    )
}
ALIASES = {"h100": "H100-SXM", "h200": "H200-SXM", "b200": "B200-SXM"}


def preset(name: str) -> Hardware:
    """The machine of that name in any case, or ``ValueError`` with near names."""
    wanted = name.strip().lower() if isinstance(name, str) else ""
    machines = PRESETS | MACS
    for known in machines.values():
        if wanted in (known.name.lower(), known.name.lower().replace("-", " ")):
            return known
    if wanted in ALIASES:
        return PRESETS[ALIASES[wanted]]
    near = hint(wanted, machines, f"known: {', '.join(machines)}")
    raise ValueError(f"no machine named {quoted(name)}; {near}")
