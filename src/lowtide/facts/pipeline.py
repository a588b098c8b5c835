"""The place of a model in a pipeline."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInPipeline:
    """One stage of a pipeline whose step has `microbatches`, of which the stage has up to `in_flight` between
    their forward and their backward pass. `sent`: of so many others, what was sent stays live. Up to
    `waiting_for_weights` have gradients of their own for the weights, which are added to the others later.
    `keeps_buffers`: the pipeline has a buffer for each gradient that arrives, all along.
    """

    index: int
    microbatches: int
    in_flight: int
    sent: int
    waiting_for_weights: int
    keeps_buffers: bool
    is_first: bool
    is_last: bool

    @property
    def accumulates(self) -> bool:
        """Whether a backward pass comes before the last forward pass, which then runs beside gradients."""
        return self.in_flight < self.microbatches
