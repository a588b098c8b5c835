"""`bincount` stays in its graph where no value can reach `minlength`, and ends the graph elsewhere."""

from collections.abc import Callable

import pytest
import torch

from lowtide.torch_compat.dynamo import Compiled
from lowtide.trace.compile_settings import tracing

ROWS, COLUMNS = 6, 5
Count = Callable[[torch.Tensor], torch.Tensor]

KNOWN: dict[str, Count] = {
    "topk": lambda x: torch.bincount(x.topk(2).indices.flatten(), minlength=COLUMNS),
    "a method": lambda x: x.topk(2, dim=-1)[1].view(-1).bincount(minlength=COLUMNS),
    "more counts": lambda x: torch.bincount(x.argmax(-1), minlength=COLUMNS + 3),
    "rows": lambda x: torch.bincount(x.argmax(0), minlength=ROWS),
    "all": lambda x: torch.bincount(x.argmax().view(1), minlength=ROWS * COLUMNS),
    "max": lambda x: torch.bincount(x.max(dim=1).indices, minlength=COLUMNS),
    "sorted": lambda x: torch.bincount(x.argmax(-1).sort().values, minlength=COLUMNS),
    "small": lambda x: torch.bincount(x.argsort(-1).to(torch.uint8)[:, 0], minlength=COLUMNS),
    "drawn": lambda x: torch.bincount(x.softmax(-1).multinomial(1).squeeze(1), minlength=COLUMNS),
}
UNKNOWN: dict[str, Count] = {
    "too few": lambda x: torch.bincount(x.argmax(-1), minlength=COLUMNS - 2),
    "no minlength": lambda x: torch.bincount(x.argmax(-1)),
    "arithmetic": lambda x: torch.bincount(x.argmax(-1) * 3, minlength=COLUMNS),
    "written": lambda x: torch.bincount(x.argmax(-1).add_(3), minlength=COLUMNS),
    "written before": lambda x: _written(x.argmax(-1)),
    "weights": lambda x: torch.bincount(x.argmax(-1), x[:, 0].double(), minlength=COLUMNS),
    "other bits": lambda x: torch.bincount(x.argmax(-1).view(torch.int32), minlength=COLUMNS),
    "values": lambda x: torch.bincount((x.abs() * 9).long().topk(1).values.view(-1), minlength=COLUMNS),
}


def _written(chosen: torch.Tensor) -> torch.Tensor:
    view = chosen[1:]
    view += 3
    return torch.bincount(chosen, minlength=COLUMNS)


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_counts(name: str) -> None:
    count = {**KNOWN, **UNKNOWN}[name]
    breaks: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        breaks.append(bool(graph.compile_subgraph_reason.graph_break))  # type: ignore[union-attr]
        return graph.forward

    # the sum goes on behind a break in another graph
    compiled = Compiled(lambda x: count(x.sin()).sum() + count(x.sin()), backend, tracing=tracing)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(ROWS, COLUMNS)
        torch.manual_seed(7)
        expected = count(x.sin()).sum() + count(x.sin())
        torch.manual_seed(7)
        found = compiled(x)
        assert torch.equal(expected, found) and expected.dtype == found.dtype
    assert any(breaks) == (name in UNKNOWN)
