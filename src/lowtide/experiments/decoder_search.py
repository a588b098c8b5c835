"""The search for the fastest mesh of a decoder: what `lowtide.planning.mesh_search` asks for, captured."""

from collections.abc import Callable

from lowtide.experiments.mesh_steps import CapturedPart, capture_part
from lowtide.facts.meshes import Mesh
from lowtide.planning.mesh_search import FASTEST, MeshSearch, search
from lowtide.planning.mesh_seconds import FIRST, LAST, WHOLE, DividedModel, Job
from lowtide.planning.stages import CAPTURED_BLOCKS, StagePlanner
from lowtide.zoo.decoder_parts import PartSize
from lowtide.zoo.decoders import DecoderSize


def divided(model: DecoderSize, *, length: int) -> DividedModel:
    """A decoder with sequences of `length` tokens, as the search needs it."""
    block = model.parameters_of_block
    return DividedModel(
        blocks=model.blocks,
        heads=model.key_heads,
        length=length,
        width=model.width,
        block_parameters=block,
        other_parameters=model.parameters - model.blocks * block,
    )


def search_decoder(
    model: DecoderSize,
    job: Job,
    *,
    length: int,
    fastest: int = FASTEST,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MeshSearch:
    """All meshes of the job's GPUs for a decoder, the fastest first."""
    captured: dict[tuple[int, int, int, str], CapturedPart] = {}

    def find(mesh: Mesh, micro_batch: int, part: str) -> StagePlanner:
        key = mesh.tensor, mesh.context, micro_batch, part
        if key not in captured:
            size = PartSize(
                model=model,
                length=length,
                blocks=CAPTURED_BLOCKS,
                tensor=mesh.tensor,
                context=mesh.context,
                is_first=part in (WHOLE, FIRST),
                is_last=part in (WHOLE, LAST),
            )
            captured[key] = capture_part(size, micro_batch, gpu=job.gpu)
        return captured[key].planner(mesh.parameter_ranks)

    return search(divided(model, length=length), job, find, fastest=fastest, progress=progress)
