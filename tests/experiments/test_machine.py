"""What `lowtide doctor` says of broken surroundings, in one line each."""

import os
import resource
import shutil
import sys
import tempfile
import warnings

import pytest
import torch

from lowtide import torch_compat
from lowtide.errors import FreshProcessError, LowtideError, UnsupportedTorch
from lowtide.experiments import machine
from lowtide.experiments.machine import Note
from lowtide.planning.native import library
from lowtide.torch_compat import inductor
from lowtide.verification import fresh_process
from lowtide.zoo import build

CHECKS = {**machine.CHECKS, **machine.WITH_TORCH}


def told(name):
    """What a check says; it is a note, and of one line."""
    found = CHECKS[name]()
    assert isinstance(found, Note) and "\n" not in found
    return found


def refused(name):
    with pytest.raises(LowtideError) as caught:
        CHECKS[name]()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nothing_is_amiss_here():
    for name in ("temporary files", "torch", "costs of ops", "planner", "transformers"):
        found = CHECKS[name]()
        assert found and not isinstance(found, Note), (name, found)


def test_costs_that_cannot_be_kept(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "file" / "costs"))
    assert "set LOWTIDE_CACHE_DIR to a folder" in told("costs of ops")


def test_a_user_without_a_home(monkeypatch):
    for name in ("LOWTIDE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert "there is no home folder" in refused("costs of ops")


def test_a_planner_that_cannot_be_built(monkeypatch):
    def missing():
        raise LowtideError("install a C compiler")

    monkeypatch.setattr(library, "find_or_build", missing)
    library.load.cache_clear()
    assert refused("planner") == "install a C compiler"


def test_a_planner_that_cannot_be_loaded(monkeypatch, tmp_path):
    (tmp_path / "native.lib").write_text("of another machine")
    monkeypatch.setattr(library, "find_or_build", lambda: tmp_path / "native.lib")
    library.load.cache_clear()
    assert f"remove {tmp_path / 'native.lib'}" in refused("planner")


def test_temporary_files_elsewhere_than_asked(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert f"TMPDIR={tmp_path / 'missing'} cannot be written" in told("temporary files")


def test_little_room_for_temporary_files(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 0))
    assert "make room" in told("temporary files")


def test_no_temporary_files_at_all(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    assert "set TMPDIR" in refused("temporary files")


@pytest.mark.parametrize("executable", ["/no/such/python", None])
def test_a_python_that_cannot_be_started(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    assert "check sys.executable" in refused("fresh processes")


def test_a_full_disk_is_not_the_models_fault(monkeypatch):
    def full(*_):
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 0))
    with pytest.raises(
        FreshProcessError, match=r"cannot be written to .*: make room, or set TMPDIR"
    ) as caught:
        fresh_process.run_fresh("os:getpid")
    assert type(caught.value) is FreshProcessError


def test_little_memory(monkeypatch):
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 30)
    assert "end other programs" in told("memory")
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 40)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 30, 1 << 30))
    assert "ulimit -v unlimited" in told("memory")


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4096)
    assert "set OMP_NUM_THREADS=" in told("threads")


def test_a_busy_machine(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (4096.0, 0.0, 0.0))
    assert "times are not to be trusted" in told("load")


def test_another_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.0.0")
    assert "newer than" in told("torch") and torch_compat.REQUIREMENT in told("torch")
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    with pytest.raises(UnsupportedTorch, match="lowtide needs torch"):
        CHECKS["torch"]()


def test_a_file_called_torch(monkeypatch):
    monkeypatch.delattr(torch, "__version__")
    assert "rename it" in refused("torch")


def test_no_transformers(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda _: None)
    assert "pip install lowtide[models]" in told("transformers")


def test_a_broken_transformers(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("operator torchvision::nms\ndoes not exist")

    monkeypatch.setattr(build, "build", broken)
    assert "(RuntimeError: operator torchvision::nms does not exist)" in refused("transformers")


def test_a_broken_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "--force-reinstall torch" in refused("torch")


def test_no_compiler_for_inductor(monkeypatch):
    monkeypatch.setattr(inductor, "has_compiler", lambda: False)
    assert "install g++" in told("inductor")


def test_no_accelerator(monkeypatch):
    def no_driver():
        warnings.warn("Found no NVIDIA driver on your system.\nInstall one", stacklevel=1)
        return False

    def torch_is_built_for(kind):
        found = None if kind is None else torch.device(kind)
        monkeypatch.setattr(
            torch.accelerator,
            "current_accelerator",
            lambda check_available=False: None if check_available else found,
        )

    torch_is_built_for(None)
    assert machine.accelerator_kind() == "" and "built for no accelerator" in machine.why_no_accelerator()
    torch_is_built_for("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert machine.accelerator_kind() == ""
    assert "no cuda device here with CUDA_VISIBLE_DEVICES=0: nvidia-smi" in machine.why_no_accelerator()
    monkeypatch.setattr(torch.cuda, "is_available", no_driver)
    assert machine.why_no_accelerator().endswith(": Found no NVIDIA driver on your system.")
