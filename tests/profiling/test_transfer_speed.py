"""The way to a store is measured with the store itself, once for each folder."""

import pytest
import torch

from lowtide.facts import Step
from lowtide.facts.plan import OffloadTarget
from lowtide.profiling import transfer_speed
from lowtide.profiling.transfer_speed import measure_transfer_speed


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A small sample, a cache of its own, and a count of the measurements."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(transfer_speed, "SAMPLE_BYTES", 1 << 18)
    measured = []
    plain = transfer_speed._transfer_seconds

    def counted(store, nbytes, device):
        measured.append(nbytes)
        return plain(store, nbytes, device)

    monkeypatch.setattr(transfer_speed, "_transfer_seconds", counted)
    return measured


STEP = Step(nodes=(), storages=())


def test_both_ways_are_measured_and_remembered(quick, tmp_path):
    before = torch.get_rng_state()
    target = OffloadTarget("disk", str(tmp_path))
    found = measure_transfer_speed(target, STEP, True)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.store == f"disk:{tmp_path}"
    assert min(found.write_bytes_per_second, found.read_bytes_per_second, found.latency_seconds) > 0
    assert 0 <= found.slows_compute <= 1
    assert quick == [4096, 1 << 18]
    assert measure_transfer_speed(target, STEP, True) == found
    assert quick == [4096, 1 << 18]
    (tmp_path / "other").mkdir()
    measure_transfer_speed(OffloadTarget("disk", str(tmp_path / "other")), STEP, True)
    measure_transfer_speed(target, STEP, False)
    assert len(quick) == 6


def test_a_remembered_folder_that_is_gone_is_made_again(quick, tmp_path):
    folder = tmp_path / "scratch"
    folder.mkdir()
    measure_transfer_speed(OffloadTarget("disk", str(folder)), STEP, True)
    folder.rmdir()
    measure_transfer_speed(OffloadTarget("disk", str(folder)), STEP, True)
    assert folder.is_dir()


def test_the_latency_is_not_counted_twice():
    nbytes = transfer_speed.SAMPLE_BYTES
    assert transfer_speed._bandwidth(1.5, 0.5) == nbytes
    assert transfer_speed._bandwidth(1.0, 0.9) == nbytes * 2
