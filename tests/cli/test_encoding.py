"""Terminals that lack characters get others, and never an error."""

import io
import sys

import pytest

from lowtide.cli.encoding import ASCII, in_ascii, write_what_can_be_read


def test_every_counterpart_is_ascii():
    assert all(len(key) == 1 and value.isascii() for key, value in ASCII.items())
    assert in_ascii("3 µs × 2 ≤ 8 … ☃") == "3 us x 2 <= 8 ... ?"


@pytest.mark.parametrize(("encoding", "written"), [("ascii", "3 us"), ("utf-8", "3 µs"), ("latin-1", "3 µs")])
def test_a_stream_replaces_only_what_it_lacks(monkeypatch, encoding, written):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    write_what_can_be_read()
    print("3 µs", end="")
    stream.flush()
    assert stream.buffer.getvalue().decode(encoding) == written
