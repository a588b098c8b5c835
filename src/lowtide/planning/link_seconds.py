"""Seconds of collectives between GPUs that are not here, from published rates of their links.

    all-gather of 1 GB to 64 GPUs in 8 nodes:   63 / 64 GB over 8 x 50 GB/s of network, at three quarters

A group of `ranks` GPUs, each `stride` behind the last, is inside of a node or spans several. Between nodes
its members in one node share the network of all of them, as NCCL's rings do.

Shortcomings: nothing else is on the links; no tree or in-switch reduction; rates are those of data sheets, at
`SHARE_OF_PEAK`.
"""

from dataclasses import dataclass, replace
from math import ceil, log2

from lowtide.facts import Step
from lowtide.facts.gpus import Gpu

SHARE_OF_PEAK = 0.75
LATENCY_SECONDS = 10e-6
"""Of each doubling of a group."""
NAMESPACE = "lowtide_mesh."


@dataclass(frozen=True, slots=True)
class LinkedGroup:
    """GPUs that exchange values: so many, each `stride` GPUs behind the last."""

    gpu: Gpu
    ranks: int
    stride: int = 1

    @property
    def bytes_per_second(self) -> float:
        """What each GPU can send meanwhile."""
        node = self.gpu.gpus_per_node
        rate = self.gpu.link_bytes_per_second
        if self.ranks * self.stride > node:
            members = max(1, node // self.stride)
            rate = min(rate, members * self.gpu.network_bytes_per_second)
        return rate * SHARE_OF_PEAK

    def gather_seconds(self, whole_bytes: float) -> float:
        """An all-gather, or a reduce-scatter, of `whole_bytes` together."""
        if self.ranks == 1:
            return 0.0
        share = (self.ranks - 1) / self.ranks
        return whole_bytes * share / self.bytes_per_second + LATENCY_SECONDS * ceil(log2(self.ranks))

    def reduce_seconds(self, nbytes: float) -> float:
        """An all-reduce of `nbytes` on each GPU."""
        return 2 * self.gather_seconds(nbytes)

    def send_seconds(self, nbytes: float) -> float:
        """A message to the next GPU of the group."""
        return nbytes / self.bytes_per_second + LATENCY_SECONDS if self.ranks > 1 else 0.0


def with_link_seconds(step: Step, tensor: LinkedGroup, context: LinkedGroup, *, key_bytes: int) -> Step:
    """The step with the seconds of its traced collectives.

    Attention over a ring takes the longer of its scores and of the exchange of `key_bytes`, the keys and
    values of one GPU; its backward pass exchanges their gradients as well.
    """
    ring = (context.ranks - 1) * context.send_seconds(key_bytes)
    nodes = list(step.nodes)
    for node in step.nodes:
        if not node.op.startswith(NAMESPACE):
            continue
        made = step.bytes_of(node.makes)
        match node.op.removeprefix(NAMESPACE).removesuffix(".default"):
            case "gather_tokens":
                seconds = tensor.gather_seconds(made)
            case "scatter_tokens":
                seconds = tensor.gather_seconds(made * tensor.ranks)
            case "ring_attention":
                seconds = max(node.seconds, ring)
            case "ring_attention_backward":
                seconds = max(node.seconds, 2 * ring)
            case _:
                seconds = 0.0  # a stage's messages are counted with the pipeline
        nodes[node.rank] = replace(node, seconds=seconds)
    return replace(step, nodes=tuple(nodes))
