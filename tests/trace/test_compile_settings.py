"""lowtide's settings hold while torch traces, and never in a step that runs what was traced before."""

import logging
import threading

import pytest
import torch
from torch import nn

import lowtide
from lowtide.torch_compat import dispatch, dynamo
from lowtide.torch_compat.aot_autograd import unprinted
from lowtide.trace import compile_settings


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was patched, in order."""
    found: list[str] = []
    places = {"settings": dynamo, "recurrent_layers_traced_by": dispatch, "unlogged": dynamo, "quiet": dynamo}
    for name, module in places.items():
        plain = getattr(module, name)

        def spy(*args, plain=plain, name=name, **options):
            found.append(name)
            return plain(*args, **options)

        monkeypatch.setattr(module, name, spy)
    return found


def test_a_step_that_was_traced_before_changes_nothing_in_torch(entered: list[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    batch = torch.randn(4, 8)
    lowtide.checkpoint(model, batch, budget="1GB")
    model(batch).sum().backward()
    assert {"settings", "unlogged"} <= set(entered), "the first call traces"
    entered.clear()
    for _ in range(3):
        model(batch).sum().backward()
    assert entered == []
    model(batch[:2]).sum().backward()
    assert "settings" in entered, "a new shape traces again"


def test_the_users_settings_come_back() -> None:
    limit = torch._dynamo.config.recompile_limit
    with compile_settings.tracing():
        assert torch._dynamo.config.recompile_limit > limit
    assert torch._dynamo.config.recompile_limit == limit


def test_only_this_threads_log_lines_are_muted(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch._dynamo.convert_frame")
    with caplog.at_level(logging.WARNING, "torch"):
        with dynamo.unlogged():
            logger.warning("from the thread that traces")
            other = threading.Thread(target=logger.warning, args=("from another thread",))
            other.start()
            other.join()
        logger.warning("afterwards")
    assert [record.getMessage() for record in caplog.records] == ["from another thread", "afterwards"]


def test_no_graph_is_written_out_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(2, 2))
    others: list[str] = []

    def write() -> str:
        text: str = graph.print_readable(print_output=False)
        return text

    with unprinted():
        assert write() == ""
        other = threading.Thread(target=lambda: others.append(write()))
        other.start()
        other.join()
    assert others == [write()]
    assert others != [""]
    monkeypatch.setenv("TORCH_TRACE", "anywhere")
    with unprinted():
        assert write() == others[0], "torch's own record has the text"
