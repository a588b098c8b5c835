"""What the user says about offloading is understood, or refused in one line."""

import pytest

from lowtide.errors import LowtideError, StoreError
from lowtide.facts.plan import OffloadTarget, offload_text, parse_offload, parse_offload_what
from lowtide.offload import offload_store
from lowtide.offload.disk_store import DiskStore
from lowtide.offload.offload_store import open_store, warn_if_in_memory


def test_a_folder_and_the_host_are_understood(tmp_path):
    assert parse_offload("disk:/a:b") == OffloadTarget("disk", "/a:b")
    assert parse_offload("host") == OffloadTarget("host")
    assert str(parse_offload("disk:/a")) == "disk:/a"
    assert isinstance(open_store(parse_offload(f"disk:{tmp_path}"), "cpu"), DiskStore)


@pytest.mark.parametrize("text", ["disk", "disk:", "/scratch", "host:x", "ram", "", True])
def test_anything_else_is_refused(text):
    with pytest.raises(LowtideError, match=r"cannot offload to .*'disk:FOLDER'"):
        parse_offload(text)


@pytest.mark.parametrize(
    ("target", "device", "instead"), [("host", "cpu", "'disk:FOLDER'"), ("disk:/tmp", "cuda:0", "'host'")]
)
def test_a_store_for_another_device_is_refused(target, device, instead):
    with pytest.raises(StoreError, match=f"this one is on {device}: write offload={instead}"):
        open_store(parse_offload(target), device)


def test_a_folder_in_memory_is_told(tmp_path, monkeypatch, caplog):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path}/shm tmpfs rw 0 0\n")
    monkeypatch.setattr(offload_store, "MOUNTS", mounts)
    warn_if_in_memory(OffloadTarget("disk", str(tmp_path)))
    assert not caplog.records
    warn_if_in_memory(OffloadTarget("disk", f"{tmp_path}/shm/mine"))
    assert "is in memory (tmpfs)" in caplog.text


def test_a_relative_folder_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_offload("disk:scratch") == OffloadTarget("disk", f"{tmp_path}/scratch")
    assert parse_offload("disk:~/scratch") == OffloadTarget("disk", "/home/me/scratch")


def test_the_earlier_name_of_the_option_is_understood():
    assert offload_text("", "host") == offload_text("host", "") == offload_text("host", "host") == "host"
    with pytest.raises(LowtideError, match="offload='host' and swap='disk:/tmp' differ"):
        offload_text("host", "disk:/tmp")


def test_what_may_be_offloaded_is_read_in_one_order():
    assert parse_offload_what("state, activations", offload="host") == ("activations", "state")
    assert parse_offload_what(["state", "state"], offload="host") == ("state",)
    assert parse_offload_what(("activations",), offload="") == ()


@pytest.mark.parametrize(
    ("words", "offload", "match"),
    [
        ("activations,weights", "host", "cannot offload 'weights'"),
        ("", "host", "cannot offload 'nothing'"),
        ("state", "", "offload_what=state says what may wait on a store, and there is none"),
    ],
)
def test_other_words_and_words_without_a_store_are_refused(words, offload, match):
    with pytest.raises(LowtideError, match=match):
        parse_offload_what(words, offload=offload)
