"""GPUs that a step can be planned for without having one: what their makers publish of them.

Rates are the dense peaks of the data sheets. Shares of them that real kernels reach are not in here.
"""

from dataclasses import dataclass

GB = 10**9
GIB = 1 << 30
MIB = 1 << 20
TERA = 10**12

ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`flops_per_second` by the type that is computed in; `tf32` stands for float32 on tensor cores.

    `copy_bytes_per_second` is one direction of its link to the host. `has_flash`: the kernels of flash
    attention run on it. `matmul_workspace_bytes` are those that torch keeps for cuBLAS, for each thread that
    multiplies: one for the forward pass, one for backward.
    """

    name: str
    words: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: dict[str, float]
    copy_bytes_per_second: float
    has_flash: bool
    matmul_workspace_bytes: int = (4096 * 2 + 16 * 8) << 10

    @property
    def label(self) -> str:
        """What a step is called that was planned for it."""
        return f"{self.name} ({ESTIMATED})"


def _gpu(
    name: str,
    words: str,
    *,
    gib: int,
    gb_per_second: float,
    tera: dict[str, float],
    link_gb_per_second: float,
    has_flash: bool = True,
    matmul_workspace_mib: float = 8.125,
) -> Gpu:
    return Gpu(
        name=name,
        words=words,
        memory_bytes=gib * GIB,
        bytes_per_second=gb_per_second * GB,
        flops_per_second={dtype: rate * TERA for dtype, rate in tera.items()},
        copy_bytes_per_second=link_gb_per_second * GB,
        has_flash=has_flash,
        matmul_workspace_bytes=int(matmul_workspace_mib * MIB),
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu(
            "a100-40g",
            "NVIDIA A100 40 GB",
            gib=40,
            gb_per_second=1555,
            tera={"float64": 9.7, "float32": 19.5, "tf32": 156, "float16": 312, "bfloat16": 312},
            link_gb_per_second=31.5,
        ),
        _gpu(
            "a100-80g",
            "NVIDIA A100 80 GB",
            gib=80,
            gb_per_second=2039,
            tera={"float64": 9.7, "float32": 19.5, "tf32": 156, "float16": 312, "bfloat16": 312},
            link_gb_per_second=31.5,
        ),
        _gpu(
            "h100-80g",
            "NVIDIA H100 80 GB",
            gib=80,
            gb_per_second=3350,
            tera={"float64": 34, "float32": 67, "tf32": 494.5, "float16": 989.5, "bfloat16": 989.5},
            link_gb_per_second=63,
            matmul_workspace_mib=32,
        ),
        _gpu(
            "l4-24g",
            "NVIDIA L4 24 GB",
            gib=24,
            gb_per_second=300,
            tera={"float64": 0.49, "float32": 30.3, "tf32": 60, "float16": 121, "bfloat16": 121},
            link_gb_per_second=31.5,
        ),
        _gpu(
            "t4-16g",
            "NVIDIA T4 16 GB",
            gib=16,
            gb_per_second=320,
            tera={"float64": 0.25, "float32": 8.1, "float16": 65},
            link_gb_per_second=15.75,
            has_flash=False,
        ),
        _gpu(
            "v100-32g",
            "NVIDIA V100 32 GB",
            gib=32,
            gb_per_second=900,
            tera={"float64": 7.8, "float32": 15.7, "float16": 125},
            link_gb_per_second=15.75,
            has_flash=False,
        ),
        _gpu(
            "rtx-3060",
            "NVIDIA GeForce RTX 3060 12 GB",
            gib=12,
            gb_per_second=360,
            tera={"float64": 0.2, "float32": 12.7, "tf32": 12.7, "float16": 25.5, "bfloat16": 25.5},
            link_gb_per_second=31.5,
        ),
        _gpu(
            "rtx-4090",
            "NVIDIA GeForce RTX 4090 24 GB",
            gib=24,
            gb_per_second=1008,
            tera={"float64": 1.3, "float32": 82.6, "tf32": 82.6, "float16": 165.2, "bfloat16": 165.2},
            link_gb_per_second=31.5,
        ),
    )
}


def gpu_behind(device: str) -> Gpu | None:
    """The GPU that a step was estimated for, by the step's device; None where it was measured."""
    name, _, mark = device.partition(" ")
    return GPUS[name] if mark == f"({ESTIMATED})" else None
