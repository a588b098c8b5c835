"""Costs on disk survive broken files, other machines and other writers."""

import logging
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lowtide.ops.calls import OpCost
from lowtide.profiling.cache import CostCache, cache_directory
from lowtide.profiling.devices import device_for

CPU = device_for(torch.device("cpu"))
COST = OpCost(0.25, 64, False, (0, 96))
LIMIT = 1 << 30


def test_saved_costs_are_read_back(tmp_path):
    cache = CostCache(CPU, directory=tmp_path / "new")
    assert cache.get("mm", memory_limit_bytes=LIMIT) is None
    cache.put("mm", COST, memory_limit_bytes=LIMIT)
    cache.save()
    assert CostCache(CPU, directory=tmp_path / "new").get("mm", memory_limit_bytes=LIMIT) == COST


def test_a_slice_is_measured_again_when_more_memory_is_allowed(tmp_path):
    cache = CostCache(CPU, directory=tmp_path)
    cache.put("mm", OpCost(1.0, 0, True), memory_limit_bytes=100)
    assert cache.get("mm", memory_limit_bytes=100) is not None
    assert cache.get("mm", memory_limit_bytes=200) is None


def _not_sqlite(path: Path) -> None:
    path.write_text("{}")


def _cut_short(path: Path) -> None:
    _filled(path.parent)
    path.write_bytes(path.read_bytes()[:5000])


def _overwritten(path: Path) -> None:
    _filled(path.parent)
    data = bytearray(path.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    path.write_bytes(data)


def _other_columns(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("create table costs (signature text)")
        database.execute("insert into costs values ('mm')")


def _other_values(path: Path) -> None:
    _filled(path.parent)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("update costs set hidden_bytes = 'much'")


def _filled(folder: Path) -> None:
    cache = CostCache(CPU, directory=folder)
    for number in range(200):
        cache.put(f"op {number}", COST, memory_limit_bytes=LIMIT)
    cache.save()


@pytest.mark.parametrize("damage", [_not_sqlite, _cut_short, _overwritten, _other_columns, _other_values])
def test_a_broken_file_is_reported_and_written_anew(tmp_path, caplog, damage):
    path = CostCache(CPU, directory=tmp_path).path
    damage(path)
    with caplog.at_level(logging.WARNING):
        cache = CostCache(CPU, directory=tmp_path)
    assert str(path) in caplog.text
    cache.put("mm", COST, memory_limit_bytes=LIMIT)
    cache.save()
    assert CostCache(CPU, directory=tmp_path).get("mm", memory_limit_bytes=LIMIT) == COST


def test_another_thread_count_has_another_file(tmp_path):
    threads = torch.get_num_threads()
    first = CostCache(CPU, directory=tmp_path).path
    torch.set_num_threads(threads + 1)
    try:
        assert CostCache(CPU, directory=tmp_path).path != first
    finally:
        torch.set_num_threads(threads)


def test_what_cannot_be_written_is_told_and_not_lost(tmp_path, caplog):
    (tmp_path / "file").touch()
    cache = CostCache(CPU, directory=tmp_path / "file")
    cache.put("mm", COST, memory_limit_bytes=LIMIT)
    with caplog.at_level(logging.WARNING):
        cache.save()
    assert "costs are not remembered" in caplog.text
    assert cache.get("mm", memory_limit_bytes=LIMIT) == COST


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    def write(number):
        cache = CostCache(CPU, directory=tmp_path)
        for step in range(20):
            cache.put(f"op {number} {step}", COST, memory_limit_bytes=LIMIT)
            cache.save()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache = CostCache(CPU, directory=tmp_path)
    names = [f"op {number} {step}" for number in range(4) for step in range(20)]
    assert all(cache.get(name, memory_limit_bytes=LIMIT) == COST for name in names)
    assert [path.suffix for path in tmp_path.iterdir()] == [".sqlite"]


def test_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv("LOWTIDE_CACHE_DIR")
    assert cache_directory() == tmp_path / "xdg" / "lowtide"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "lowtide"


def test_the_tests_never_reach_the_users_folder(temporary_home):
    code = (
        "import os\n"
        "from lowtide.profiling.cache import cache_directory\n"
        "for name in ('LOWTIDE_CACHE_DIR', 'XDG_CACHE_HOME', 'HOME'):\n"
        "    print(cache_directory())\n"
        "    del os.environ[name]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = [cache_directory(), *map(Path, done.stdout.split())]
    assert len(found) == 4
    assert all(folder.is_relative_to(temporary_home) for folder in found), found
