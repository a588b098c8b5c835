"""Plans inside of DDP and FSDP2 on two devices: equal to training without a plan, and within the budget."""

import pytest
import torch
from accelerator_ranks import Compared
from ranks import Group, run_ranks
from torch import distributed

pytestmark = pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")

KINDS = ["ddp", "fsdp2", "fsdp2_with_residuals_outside"]


@pytest.fixture(scope="module")
def compared(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Compared]]:
    """By kind, what each rank saw."""
    own = distributed.Backend.default_device_backend_map[device.type]
    backend = f"cpu:gloo,{device.type}:{own}"
    folder = {"folder": str(tmp_path_factory.mktemp("plans"))}
    ended = run_ranks({kind: Group(f"accelerator_ranks:{kind}", folder, backend=backend) for kind in KINDS})
    assert not any(rank.error for ranks in ended.values() for rank in ranks), ended
    return {kind: [rank.value for rank in ranks] for kind, ranks in ended.items()}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_two_devices_train_by_plans(kind: str, compared: dict[str, list[Compared]]) -> None:
    assert len(compared[kind]) == 2
    for rank in compared[kind]:
        assert rank.different == []
        assert rank.races == []
        assert rank.recompute_seconds > 0
        assert rank.measured_bytes <= rank.budget_bytes
