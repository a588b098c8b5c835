"""What torchrun runs in `test_torchrun.py`: modules that hold their outputs and that do not."""

import torch
import torch.distributed as dist
from test_lightning import Holding, fit
from torch import nn


class InOne(Holding):
    """All that is trained is in one module, as it has to be where several processes train."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__(returns=returns)
        self.parts = nn.ModuleList([nn.Sequential(*self.parts)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[0](x)


def main() -> None:
    settings = {"strategy": "ddp", "devices": 2, "limit_val_batches": 0}
    for returns in (False, True):
        (plain, _), (planned, plan) = (
            fit("", budget, module=InOne(returns=returns), **settings) for budget in (None, "80%")
        )
        assert dist.get_world_size() == 2
        assert plan.solution.holds_outputs is returns, "all ranks find it out"
        assert plan.recompute_seconds > 0 or not returns
        assert len(plain.losses) == 4 and all(map(torch.equal, plain.losses, planned.losses))
        assert all(map(torch.equal, plain.state_dict().values(), planned.state_dict().values()))
    print(f"rank {dist.get_rank()} is as without it")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
