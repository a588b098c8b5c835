"""Processes of a DistributedDataParallel offload to one folder, each to its own file."""

import pytest
from ranks import on_ranks

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_two_processes_offload_and_train_as_eager_does(tmp_path):
    for different, num_offloaded, file_bytes in on_ranks("offload_ranks:trained", folder=str(tmp_path)):
        assert different == []
        assert num_offloaded > 3 and file_bytes > 0
    assert not [path for path in tmp_path.iterdir() if path.name != "plan.json"]
