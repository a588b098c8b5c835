import pytest
from impatience import SHORT_SEARCH

from lowtide.planning import auto

LONG_SEARCH = {name: getattr(auto, name) for name in SHORT_SEARCH}


@pytest.fixture(autouse=True)
def long_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans as good as those of users."""
    for name, value in LONG_SEARCH.items():
        monkeypatch.setattr(auto, name, value)
