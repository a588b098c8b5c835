"""Attention in one op on an accelerator: recomputable, with integers and random state among its results."""

from functools import partial
from types import ModuleType

import pytest
import torch
from accelerator_cases import as_target, check
from torch import nn
from torch.nn import functional

KINDS = ["efficient", "flash", "overrideable"]


class Attention(nn.Module):
    """Causal self-attention with a residual, whose dropout comes from the op's own seed."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.dropout = dropout

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        parts = self.inner(self.norm(value)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        query, key, inner = parts.unbind()
        made = functional.scaled_dot_product_attention(
            query, key, inner, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return value + self.outer(made.transpose(1, 2).flatten(2))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.long), 0.2])
def test_attention_is_recomputed_with_its_own_mask(
    kind: str, dropout: float, standin: ModuleType, device: torch.device
) -> None:
    getattr(standin, f"set_{kind}_attention")(True)
    model = nn.Sequential(*(Attention(dropout) for _ in range(6)))
    autocast = partial(torch.autocast, device.type, torch.bfloat16)
    target = as_target(model, torch.randn(64, 16, 64), within=autocast, loss=squares)
    plan = check(target, device, share=0.6, steps=2, cache=False)
    again = {plan.step.nodes[run.rank].op for run in plan.solution.schedule.runs if not run.is_first}
    assert [op for op in again if op.endswith("attention.default") or "overrideable" in op]


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()
