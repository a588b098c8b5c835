import sys

import pytest

from lowtide.cli import app


@pytest.fixture
def run_lowtide(monkeypatch, capsys):
    """Run the command line in this process: `code, stdout, stderr = run_lowtide("models", "--json")`."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lowtide", *arguments])
        with pytest.raises(SystemExit) as caught:
            app.main()
        return (caught.value.code or 0, *capsys.readouterr())

    return run
