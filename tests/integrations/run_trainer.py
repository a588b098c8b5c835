"""What torchrun runs in `test_torchrun.py`: the same training twice, with and without the callback."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from test_transformers import check_same, gpt, train


def main(folder: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "bf16": True, "max_steps": 2, "build": gpt}
    plain, planned = (train(folder, budget, **settings) for budget in (None, "90%"))
    assert dist.get_world_size() == 2
    check_same(plain, planned)
    print(f"rank {dist.get_rank()} is as without it")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
