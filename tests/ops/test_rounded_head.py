"""A head in chunks of rows computes what the whole head computes, up to rounding, and holds no logits."""

from contextlib import nullcontext

import pytest
import torch
from heads import CLASSES, IGNORED, LanguageModel, tokens
from torch import fx, nn

from lowtide.analyze.captured_step import capture
from lowtide.analyze.rounded_graphs import rounded
from lowtide.ops.rounded_head import READ_BY_LOOP
from lowtide.trace.segments import Segment

CASES = {
    "plain": LanguageModel,
    "bias": lambda: LanguageModel(bias=True),
    "smoothing, ignored": lambda: LanguageModel(bias=True, label_smoothing=0.1, ignore_index=IGNORED),
    "no reduction": lambda: LanguageModel(bias=True, reduction="none"),
    "sum": lambda: LanguageModel(reduction="sum"),
    "class weights": lambda: LanguageModel("weighted", ignore_index=IGNORED),
    "shifted, tied": lambda: LanguageModel("shifted", tied=True),
    "log-probabilities": lambda: LanguageModel("picked"),
    "log-probabilities, shifted": lambda: LanguageModel("picked_shifted", bias=True),
    "frozen head": lambda: frozen("head"),
    "frozen body": lambda: frozen("tokens", "layer"),
    "bfloat16": lambda: LanguageModel("float").to(torch.bfloat16),
    "autocast": lambda: LanguageModel(bias=True),
    "autocast, float": lambda: LanguageModel("float", tied=True),
}
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def frozen(*names: str) -> nn.Module:
    model = LanguageModel()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    return model


def run(segment: Segment, model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor | None]:
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers(), ids)}
    inputs = []
    for node in segment.joint.graph.find_nodes(op="placeholder"):
        if node in segment.tangents:
            inputs.append(torch.ones(node.meta["val"].shape, dtype=node.meta["val"].dtype))
        else:
            origin = segment.origins[segment.primals.index(node)]
            inputs.append(tensors[origin.tensor].detach())
    torch.manual_seed(3)
    return list(fx.Interpreter(segment.joint).run(*inputs))


@pytest.mark.parametrize("case", CASES)
def test_a_head_in_chunks_is_equal_up_to_rounding(case: str) -> None:
    torch.manual_seed(0)
    model, ids = CASES[case](), tokens()
    half = case == "bfloat16" or case.startswith("autocast")
    with torch.autocast("cpu", dtype=torch.bfloat16) if "autocast" in case else nullcontext():
        captured = capture(model, ids)
    (segment,) = captured.segments
    chunked, changed, refused = rounded(segment, returned={0})
    assert changed and not refused
    whole, found = run(segment, model, ids), run(chunked, model, ids)
    for one, other in zip(whole, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None and one.is_floating_point():
            assert one.dtype is other.dtype and one.shape == other.shape
            far = (one.double() - other.double()).norm() / one.double().norm().clamp(min=1e-12)
            assert far < ROUNDING[torch.bfloat16 if half else torch.float32]
    values = [n.meta["val"] for n in chunked.joint.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    largest = max(value.untyped_storage().nbytes() for value in values)
    assert largest < ids.numel() * CLASSES  # a fourth of all logits in float32


def test_a_target_out_of_range_is_an_error_as_in_eager() -> None:
    from lowtide.ops.head_chunks import head_values

    hidden, weight = torch.randn(8, 4), torch.randn(4, 6)
    for wrong in (6, -1):
        target = torch.full((8,), wrong)
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            head_values([hidden, weight], (), torch.float32, target, -100, False)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("twice", "reads all logits as well"),
        ("returned", READ_BY_LOOP),
        ("logits", ""),
        ("classes_second", ""),
    ],
)
def test_a_head_that_others_read_stays_whole(kind: str, reason: str) -> None:
    torch.manual_seed(0)
    captured = capture(LanguageModel(kind), tokens())
    before = str(captured.segments[0].joint.graph)
    segment, changed, refused = rounded(captured.segments[0], returned={0, 1})
    assert not changed and str(segment.joint.graph) == before
    assert any(reason in why for why in refused) if reason else not refused
