"""Processes of a DistributedDataParallel swap to one folder, each for itself."""

import pytest
from offload_ranks import trained
from processes import on_processes

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_two_processes_swap_and_train_as_eager_does(tmp_path):
    for different, num_swapped, file_bytes in on_processes(trained, 2, tmp_path / "ranks", str(tmp_path)):
        assert different == []
        assert num_swapped > 3 and file_bytes > 0
    assert not [path for path in tmp_path.iterdir() if path.name not in ("ranks", "plan.json")]
