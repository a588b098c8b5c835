"""GPUs that a step can be planned for on a machine without them, by the figures of their data sheets.

Rates are dense peaks. How much of a peak real kernels reach is known to `profiling/roofline.py`.
"""

from dataclasses import dataclass
from typing import TypedDict

GB = 10**9
GIB = 1 << 30
MIB = 1 << 20
TERA = 10**12

ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`flops_per_second` by dtype of the computation; `tf32` stands for float32 on tensor cores.

    `copy_bytes_per_second`: one direction of a copy to the host. `has_flash`: flash attention runs on it.
    `gpus_per_node` of them are joined by links of `link_bytes_per_second` each, in one direction; to other
    nodes each has its share of the node's network, `network_bytes_per_second`.
    `matmul_workspace_bytes`: what torch allocates for cuBLAS in each thread that multiplies: one thread for
    the forward pass, one for backward.
    """

    name: str
    words: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: dict[str, float]
    copy_bytes_per_second: float
    has_flash: bool
    link_bytes_per_second: float
    network_bytes_per_second: float
    gpus_per_node: int = 8
    matmul_workspace_bytes: int = (4096 * 2 + 16 * 8) << 10

    @property
    def label(self) -> str:
        """The device of a step that was planned for this GPU."""
        return f"{self.name} ({ESTIMATED})"


class _Links(TypedDict):
    link_gb: float
    network_gb: float


def _gpu(
    name: str,
    words: str,
    tera: dict[str, float],
    *,
    gib: int,
    gb: float,
    copy_gb: float,
    link_gb: float | None = None,
    network_gb: float = 12.5 / 8,
    has_flash: bool = True,
    workspace_mib: float = 8.125,
) -> Gpu:
    """`tera`: operations per second, by dtype. `gib`: memory. `gb`, `copy_gb`: per second, of its memory
    and to the host. `link_gb`: to another GPU of the node, over the bus unless said. `network_gb`: the GPU's
    share of a node's network, an eighth of 100 Gbit/s unless said."""
    return Gpu(
        name=name,
        words=words,
        memory_bytes=gib * GIB,
        bytes_per_second=gb * GB,
        flops_per_second={dtype: rate * TERA for dtype, rate in tera.items()},
        copy_bytes_per_second=copy_gb * GB,
        has_flash=has_flash,
        link_bytes_per_second=(copy_gb if link_gb is None else link_gb) * GB,
        network_bytes_per_second=network_gb * GB,
        matmul_workspace_bytes=int(workspace_mib * MIB),
    )


_A100 = {"float64": 9.7, "float32": 19.5, "tf32": 156, "float16": 312, "bfloat16": 312}
_H100 = {"float64": 34, "float32": 67, "tf32": 494.5, "float16": 989.5, "bfloat16": 989.5}
_L4 = {"float64": 0.49, "float32": 30.3, "tf32": 60, "float16": 121, "bfloat16": 121}
_T4 = {"float64": 0.25, "float32": 8.1, "float16": 65}
_V100 = {"float64": 7.8, "float32": 15.7, "float16": 125}
_RTX_3060 = {"float64": 0.2, "float32": 12.7, "tf32": 12.7, "float16": 25.5, "bfloat16": 25.5}
_RTX_4090 = {"float64": 1.3, "float32": 82.6, "tf32": 82.6, "float16": 165.2, "bfloat16": 165.2}

_DGX_A100 = _Links(link_gb=300, network_gb=25)
_DGX_H100 = _Links(link_gb=450, network_gb=50)
_DGX_V100 = _Links(link_gb=150, network_gb=6.25)
"""NVLink in one direction, and the node's network for each of its eight GPUs."""

GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40g", "NVIDIA A100 40 GB", _A100, gib=40, gb=1555, copy_gb=31.5, **_DGX_A100),
        _gpu("a100-80g", "NVIDIA A100 80 GB", _A100, gib=80, gb=2039, copy_gb=31.5, **_DGX_A100),
        _gpu(
            "h100-80g", "NVIDIA H100 80 GB", _H100, gib=80, gb=3350, copy_gb=63, workspace_mib=32, **_DGX_H100
        ),
        _gpu("l4-24g", "NVIDIA L4 24 GB", _L4, gib=24, gb=300, copy_gb=31.5),
        _gpu("t4-16g", "NVIDIA T4 16 GB", _T4, gib=16, gb=320, copy_gb=15.75, has_flash=False),
        _gpu(
            "v100-32g",
            "NVIDIA V100 32 GB",
            _V100,
            gib=32,
            gb=900,
            copy_gb=15.75,
            has_flash=False,
            **_DGX_V100,
        ),
        _gpu("rtx-3060", "NVIDIA GeForce RTX 3060 12 GB", _RTX_3060, gib=12, gb=360, copy_gb=31.5),
        _gpu("rtx-4090", "NVIDIA GeForce RTX 4090 24 GB", _RTX_4090, gib=24, gb=1008, copy_gb=31.5),
    )
}


def gpu_behind(device: str) -> Gpu | None:
    """The GPU that a step was estimated for, by the step's device; None for a measured step."""
    name, _, mark = device.partition(" ")
    return GPUS[name] if mark == f"({ESTIMATED})" else None
