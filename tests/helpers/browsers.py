"""Chromium without a window, for tests that look at pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--window-size=1200,900",
)  # fmt: skip
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium chromium-driver)"
)


@contextmanager
def browsing(folder: Path) -> Iterator[Any]:
    """A browser that keeps its own files in `folder`, and a log of what it does."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (pip install lowtide[dev])")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with pytest.MonkeyPatch.context() as patch:
        # The driver is on this machine and needs no proxy, whatever the environment says.
        patch.setenv("NO_PROXY", "localhost,127.0.0.1")
        patch.setenv("no_proxy", "localhost,127.0.0.1")
        started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        try:
            yield started
        finally:
            started.quit()
