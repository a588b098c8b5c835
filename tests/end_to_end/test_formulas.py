"""The predicted peak of a step is the measured one, whatever formulas eager takes for its gradients.

A formula often works in place on real tensors and not on fake ones (`docs/formulas.md`).
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.analyze.captured_step import SCALARS_BYTES
from lowtide.profiles import Profile
from lowtide.profiling.devices import Cpu

ROWS, COLUMNS = 128, 600
torch.manual_seed(0)
TARGET, OTHER, WEIGHT = torch.rand(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS), torch.rand(COLUMNS)
CLASS = torch.randint(COLUMNS, (ROWS,))
PLACE = torch.randint(COLUMNS, (ROWS, COLUMNS))
SIGN = torch.where(TARGET > 0.5, 1.0, -1.0)
MASK = TARGET > 0.5
logits_loss = F.binary_cross_entropy_with_logits
Function = Callable[[Tensor], Tensor]

SAMPLE: dict[str, Function] = {
    "logits loss": lambda h: logits_loss(h, TARGET),
    "logits loss with weights": lambda h: logits_loss(h, TARGET, weight=OTHER, pos_weight=WEIGHT),
    "norm": lambda h: h.norm(),
    "norm of rows, p = 3": lambda h: h.norm(p=3, dim=1).mean(),
    "renorm": lambda h: h.renorm(2, 0, 1.0).mean(),
    "cumprod": lambda h: (1 + 0.01 * torch.tanh(h)).cumprod(1).mean(),
    "largest of rows": lambda h: h.max(1)[0].mean(),
    "smoothed cross entropy": lambda h: F.cross_entropy(h, CLASS, weight=WEIGHT, label_smoothing=0.1),
    "deviation and mean": lambda h: sum(each.mean() for each in torch.std_mean(h, 1)),
    "gather": lambda h: h.gather(1, PLACE).mean(),
}
GRID: dict[str, Function] = {
    "logits loss, sum": lambda h: logits_loss(h, TARGET, reduction="sum"),
    "logits loss, none": lambda h: logits_loss(h, TARGET, reduction="none").mean(),
    "logits loss, pos_weight": lambda h: logits_loss(h, TARGET, pos_weight=WEIGHT),
    "logits loss, weight": lambda h: logits_loss(h, TARGET, weight=OTHER),
    "probabilities loss": lambda h: F.binary_cross_entropy(h.sigmoid(), TARGET),
    "mse": lambda h: F.mse_loss(h, TARGET),
    "l1": lambda h: F.l1_loss(h, TARGET),
    "huber": lambda h: F.huber_loss(h, TARGET),
    "smooth l1": lambda h: F.smooth_l1_loss(h, TARGET),
    "poisson": lambda h: F.poisson_nll_loss(h, TARGET),
    "soft margin": lambda h: F.soft_margin_loss(h, SIGN),
    "multilabel soft margin": lambda h: F.multilabel_soft_margin_loss(h, MASK.float()),
    "multi margin": lambda h: F.multi_margin_loss(h, CLASS),
    "cosine embedding": lambda h: F.cosine_embedding_loss(h, OTHER, torch.ones(ROWS)),
    "triplet": lambda h: F.triplet_margin_loss(h, OTHER, TARGET),
    "cross entropy": lambda h: F.cross_entropy(h, CLASS),
    "weighted cross entropy": lambda h: F.cross_entropy(h, CLASS, weight=WEIGHT),
    "cross entropy of probabilities": lambda h: F.cross_entropy(h, TARGET),
    "negative log-likelihood": lambda h: F.nll_loss(h.log_softmax(1), CLASS, weight=WEIGHT),
    "log softmax": lambda h: h.log_softmax(1).mul(TARGET).mean(),
    "norm, p = 1": lambda h: h.norm(p=1),
    "norm, p = 1/2": lambda h: h.norm(p=0.5),
    "norm, p = 3/2": lambda h: h.norm(p=1.5),
    "norm, p = inf": lambda h: h.norm(p=float("inf")),
    "norm of rows": lambda h: h.norm(dim=1).mean(),
    "norm of rows, p = inf": lambda h: h.norm(p=float("inf"), dim=1).mean(),
    "vector norm": lambda h: torch.linalg.vector_norm(h, 4, dim=1).mean(),
    "matrix norm": torch.linalg.matrix_norm,
    "normalize": lambda h: F.normalize(h).pow(2).mean(),
    "weight norm": lambda h: F.linear(OTHER, torch._weight_norm(h, TARGET[:, :1], 0)).square().mean(),
    "distances, p = 1": lambda h: torch.cdist(h, OTHER, p=1).mean(),
    "distance": lambda h: torch.dist(h, OTHER, 3),
    "pairwise distance": lambda h: F.pairwise_distance(h, OTHER).mean(),
    "cosine similarity": lambda h: F.cosine_similarity(h, OTHER).mean(),
    "layer norm": lambda h: F.layer_norm(h, (COLUMNS,)).square().mean(),
    "rms norm": lambda h: F.rms_norm(h, (COLUMNS,)).square().mean(),
    "variance": lambda h: h.var(1).mean(),
    "deviation": lambda h: h.std(),
    "product": lambda h: (1 + h * 0.01).prod(1).mean(),
    "cumsum": lambda h: h.cumsum(1).mean(),
    "logcumsumexp": lambda h: h.logcumsumexp(1).mean(),
    "cummax": lambda h: h.cummax(1)[0].mean(),
    "largest": lambda h: h.max(),
    "amax": lambda h: h.amax(1).mean(),
    "median": lambda h: h.median(1)[0].mean(),
    "topk": lambda h: h.topk(50, 1)[0].mean(),
    "where": lambda h: torch.where(MASK, h, OTHER).square().mean(),
    "masked fill": lambda h: h.masked_fill(MASK, 0.0).mean(),
    "index": lambda h: h[CLASS % ROWS].mean(),
    "index select": lambda h: h.index_select(0, CLASS % ROWS).mean(),
    "take": lambda h: h.take(PLACE).mean(),
    "scatter add": lambda h: OTHER.scatter_add(1, PLACE, h).mean(),
    "clamp": lambda h: h.clamp(-0.5, 0.5).mean(),
    "maximum": lambda h: torch.maximum(h, OTHER).mean(),
    "atan2": lambda h: torch.atan2(h, OTHER).mean(),
    "sinc": lambda h: torch.sinc(h).mean(),
    "nan_to_num": lambda h: h.nan_to_num().mean(),
    "addcdiv": lambda h: torch.addcdiv(h, h, TARGET + 1).mean(),
    "lerp": lambda h: torch.lerp(h, OTHER, TARGET).mean(),
    "quotient": lambda h: (h / (h.square() + 1)).mean(),
}


class Inside(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(16, COLUMNS), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def measured_bytes(model: nn.Module, x: Tensor, function: Function, found: Profile) -> int:
    """The true peak of a step: the tensors that are there before, and what torch allocates."""

    def step() -> None:
        output = model(x)
        (output if isinstance(model, Inside) else function(output)).backward()
        model.zero_grad(set_to_none=True)

    step()
    step()
    return found.step.static_bytes - SCALARS_BYTES + Cpu().measured(step)[1]


def check(function: Function, *, inside: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, 16)
    model = Inside(function) if inside else nn.Linear(16, COLUMNS)
    found = lowtide.profile(model, x, loss=None if inside else function)
    assert found.floor_bytes <= found.peak_bytes
    assert measured_bytes(model, x, function, found) == pytest.approx(found.peak_bytes, rel=0.01)
    plan = found.plan(found.floor_bytes)
    plan.apply(model)
    measured = measured_bytes(model, x, function, found)
    assert measured <= found.floor_bytes
    assert measured == pytest.approx(plan.peak_bytes, rel=0.02)


@pytest.mark.sample(6)
@pytest.mark.slow
@pytest.mark.parametrize("inside", (True, False), ids=("in the model", "in the loss"))
@pytest.mark.parametrize("name", SAMPLE)
def test_predicted_is_measured(name: str, inside: bool) -> None:
    check(SAMPLE[name], inside=inside)


@pytest.mark.long
@pytest.mark.parametrize("inside", (True, False), ids=("in the model", "in the loss"))
@pytest.mark.parametrize("name", GRID)
def test_predicted_is_measured_for_many_ops(name: str, inside: bool) -> None:
    check(GRID[name], inside=inside)
