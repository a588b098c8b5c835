"""Meshes of GPUs: how many of them share the samples, the layers, the blocks and the sequence of one step.

    replicas x shards x context x tensor x pipeline = all GPUs

    dp 2x32 tp 8     512 GPUs: each layer is divided among 8 of them, the samples among 64 such groups, and
                     the parameters of a group's part among 32 (HSDP with two replicas)

GPUs of a tensor-parallel group are neighbours, then come those of a sequence, of the shards, of the replicas,
and of the pipeline.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mesh:
    """The sizes of the dimensions of a mesh.

    `replicas` have the same parameters. `shards` divide them (FSDP2), together with `context`. Both divide
    the samples of a step.
    """

    replicas: int = 1
    shards: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def gpus(self) -> int:
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def data(self) -> int:
        """How many groups of GPUs have samples of their own."""
        return self.replicas * self.shards

    @property
    def parameter_ranks(self) -> int:
        """The GPUs that the parameters of one part of the model are divided among."""
        return self.shards * self.context

    @property
    def label(self) -> str:
        """`dp 2x32 tp 8`; dimensions of one GPU are left out."""
        data = f"{self.replicas}x{self.shards}" if self.replicas > 1 else str(self.shards)
        others = {"tp": self.tensor, "pp": self.pipeline, "cp": self.context}
        return " ".join([f"dp {data}", *(f"{name} {size}" for name, size in others.items() if size > 1)])
