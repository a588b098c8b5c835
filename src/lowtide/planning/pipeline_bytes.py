"""What a pipeline keeps live around the calls of one of its stages.

    first stage    the batch of the step, of which each micro-batch is a part
    others         a buffer for the input of each micro-batch
    last stage     the outputs of all micro-batches, and their targets
    others         a buffer for the gradient of each micro-batch's output
    sends          outputs, and gradients of inputs, as long as the schedule has not waited for the send
    zero bubble    gradients of weights, from the backward pass of the inputs to that of the weights

From torch 2.15 on, a gradient's buffer is allocated when it arrives, and freed. The inputs, outputs and
targets of the micro-batches in flight are a part of the calls themselves.
"""

from dataclasses import replace

from lowtide.facts import EARLIER, LAST_OUTPUTS, PIPELINE, Kind, Region, Step, Storage
from lowtide.facts.pipeline import StageInPipeline
from lowtide.planning.schedules import batch_bytes


def in_pipeline(step: Step, stage: StageInPipeline) -> Step:
    """The step of one call with the bytes that the pipeline keeps live, and without outputs of the last step,
    which it has freed."""
    others = stage.microbatches - stage.in_flight
    outputs = _output_bytes(step)
    nbytes = others * batch_bytes(step)
    if stage.is_last:
        copied, shared = _target_bytes(step)
        nbytes += others * (outputs + copied) + (stage.microbatches - 1) * shared
    else:
        nbytes += (stage.sent + (stage.microbatches if stage.keeps_buffers else 0)) * outputs
    if not stage.is_first:
        nbytes += stage.sent * batch_bytes(step)
    nbytes += stage.waiting_for_weights * _gradient_bytes(step)
    kept = Storage(id=len(step.storages), nbytes=nbytes, kind=Kind.INPUT, name=PIPELINE, static=True)
    storages = [
        replace(s, nbytes=0, extra_eager_bytes=0) if s.name == LAST_OUTPUTS else s for s in step.storages
    ]
    return replace(step, storages=(*storages, kept), pipeline=True)


def kept_bytes(step: Step) -> int:
    """The bytes that a pipeline keeps live besides the micro-batches in flight; 0 without a pipeline."""
    return sum(storage.nbytes for storage in step.storages if storage.name == PIPELINE)


def _target_bytes(step: Step) -> tuple[int, int]:
    """The bytes of the tensors that the loss reads besides outputs: those that a step has for each call, and
    those that it has once, which the function of the loss refers to itself."""
    in_loss = _loss_graphs(step)
    made = {s for node in step.nodes if node.segment in in_loss for s in node.makes}
    read = [storage for storage in step.storages if storage.id in made and storage.static]
    copied = sum(storage.nbytes for storage in read if storage.kind is Kind.INPUT)
    return copied, sum(storage.nbytes for storage in read if storage.kind is Kind.OTHER)


def _loss_graphs(step: Step) -> set[int]:
    return {index for index, graph in enumerate(step.graphs) if not graph.in_model}


def _gradient_bytes(step: Step) -> int:
    """The bytes of the gradients that one call makes for the parameters."""
    gradients = [s.nbytes for s in step.storages if s.kind is Kind.GRADIENT and s.name != EARLIER]
    return sum(gradients)


def _output_bytes(step: Step) -> int:
    """The bytes of the outputs that the model returns for one micro-batch."""
    in_loss = _loss_graphs(step)
    made = {
        s
        for node in step.nodes
        if node.region is Region.FORWARD and node.segment not in in_loss
        for s in node.makes
        if step.storages[s].pinned and step.storages[s].kind is not Kind.GRADIENT
    }
    return sum(step.storages[s].nbytes for s in made)
