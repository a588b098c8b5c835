"""Batch norm on an accelerator: the vendor's kernel where eager calls it, statistics counted once."""

from functools import partial
from types import ModuleType

import pytest
import torch
from accelerator_cases import as_target, check
from torch import nn

from lowtide.errors import LowtideError
from lowtide.ops import eager_batch_norm

CUDNN = 1
"""As torch numbers libraries."""


class Net(nn.Module):
    """Convolutions with a norm each; the last part is `head`."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(16 if index else 3, 16, 3, padding=1) for index in range(len(norms))
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            value = norm(convolution(value)).relu()
        return value


def images() -> torch.Tensor:
    return torch.randn(16, 3, 32, 32)


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def norms(**options: object) -> list[nn.Module]:
    return [nn.BatchNorm2d(16, **options) for _ in range(5)]


OPTIONS = {
    "plain": {},
    "no parameters": {"affine": False},
    "no statistics": {"track_running_stats": False},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("vendor", [False, True], ids=["torch", "vendor"])
def test_the_vendors_kernel_runs_where_eager_calls_it(
    name: str, vendor: bool, standin: ModuleType, device: torch.device
) -> None:
    standin.set_vendor_batch_norm(vendor)
    plan = check(as_target(Net(*norms(**OPTIONS[name])), images()), device, share=0.6)
    assert plan.recompute_seconds > 0


def test_a_cumulative_average_ends_a_graph_at_each_norm(standin: ModuleType, device: torch.device) -> None:
    standin.set_vendor_batch_norm(True)
    check(as_target(Net(*norms(momentum=None)), images()), device, share=1.0)


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.long), torch.float16])
def test_under_autocast(dtype: torch.dtype, standin: ModuleType, device: torch.device) -> None:
    standin.set_vendor_batch_norm(True)
    autocast = partial(torch.autocast, device.type, dtype)
    target = as_target(Net(*norms()), images(), within=autocast, loss=squares)
    check(target, device, share=0.7)


def test_frozen_norms_and_norms_of_instances(standin: ModuleType, device: torch.device) -> None:
    standin.set_vendor_batch_norm(True)
    kinds = [
        *norms()[:2],
        nn.BatchNorm2d(16).eval(),
        nn.InstanceNorm2d(16, affine=True, track_running_stats=True),
        nn.InstanceNorm2d(16),
    ]
    check(as_target(Net(*kinds), images()), device, share=0.7)


def test_images_in_channels_last(standin: ModuleType, device: torch.device) -> None:
    standin.set_vendor_batch_norm(True)
    model = Net(*norms()).to(memory_format=torch.channels_last)
    check(as_target(model, images().to(memory_format=torch.channels_last)), device, share=0.6)


def test_the_vendors_reserve_is_kept_counted_and_recomputed(
    standin: ModuleType, device: torch.device
) -> None:
    standin.set_vendor_batch_norm(True)
    kinds = [*norms()[:3], nn.BatchNorm2d(16).eval(), nn.BatchNorm2d(16, affine=False)]
    for share in (1.0, 0.6):
        check(as_target(Net(*kinds), images()), device, share=share)


def test_another_library_than_the_captured_one_is_refused(standin: ModuleType, device: torch.device) -> None:
    standin.set_vendor_batch_norm(True)
    value = torch.randn(4, 3, 8, 8, device=device)
    options = (None, None, None, None, True, 0.1, 1e-5)
    with pytest.raises(LowtideError, match="runs by torch's own kernel and was captured with cuDNN"):
        eager_batch_norm.eager_batch_norm(value, *options, CUDNN)
