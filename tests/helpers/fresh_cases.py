"""What the fresh processes of tests run: they import this file, and little else."""

import os
import time
from dataclasses import replace
from pathlib import Path


def take_first(target, *, count):
    """A `prepare` hook."""
    return replace(target, batch=target.batch[:count].clone())


def raise_here(text):
    raise ValueError(f"{text}\nsecond line")


def sleep_in(folder):
    partial = Path(folder) / "partial"
    partial.write_text(str(os.getpid()))
    partial.rename(Path(folder) / "pid")
    time.sleep(60)
