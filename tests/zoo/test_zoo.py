import builtins
import os
import subprocess
import sys
import warnings

import pytest
import torch

from lowtide.errors import TargetError
from lowtide.zoo import CATALOG, find_entry
from lowtide.zoo.build import build, make_optimizer
from lowtide.zoo.from_transformers import quiet

pytestmark = pytest.mark.slow

TINY = [name for name in CATALOG if name.startswith("tiny-")]


def loss_of(output):
    return output if isinstance(output, torch.Tensor) else output.loss


def test_every_target_has_a_tiny_variant():
    full = {name for name in CATALOG if name not in TINY}
    assert {f"tiny-{name}" for name in full} == set(TINY)
    assert full == {"resnet152", "bert-base", "bert-base-mlm", "transformer", "gpt2", "vit", "unet"}


@pytest.mark.parametrize("name", TINY)
def test_a_step_trains(name):
    model, batch, optimizer = build(name, batch_size=2)
    assert model.training
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = loss_of(model(**batch))
    assert loss.dim() == 0 and torch.isfinite(loss)
    loss.backward()
    optimizer.step()
    after = list(model.parameters())
    assert all(parameter.grad is not None for parameter in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", TINY)
def test_batch_size_one_works(name):
    model, batch, _ = build(name, batch_size=1, optimizer="none")
    assert all(tensor.shape[0] == 1 for tensor in batch.values())
    assert torch.isfinite(loss_of(model(**batch)))


@pytest.mark.parametrize("name", TINY)
def test_the_seed_decides_and_torch_is_left_alone(name):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, again, other = (build(name, batch_size=2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    same = zip(first.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert all(torch.equal(first.batch[key], again.batch[key]) for key in first.batch)
    assert any(not torch.equal(first.batch[key], other.batch[key]) for key in first.batch)


@pytest.mark.parametrize("name", TINY)
def test_the_size_can_be_chosen(name):
    entry = find_entry(name)
    size = 2 * getattr(entry, entry.option)
    model, batch, _ = build(name, batch_size=1, optimizer="none", **{entry.option: size})
    assert any(size in tensor.shape for tensor in batch.values())
    assert torch.isfinite(loss_of(model(**batch)))


@pytest.mark.parametrize(
    ("name", "option", "right"),
    [("tiny-vit", "sequence_length", "image size"), ("tiny-gpt2", "image_size", "sequence length")],
)
def test_an_option_that_does_not_apply_says_which_does(name, option, right):
    with pytest.raises(TargetError, match=f"size that can be chosen is its {right}"):
        build(name, batch_size=1, **{option: 64})


@pytest.mark.parametrize(("name", "image_size"), [("tiny-unet", 50), ("vit", 225), ("unet", 0)])
def test_sizes_the_model_cannot_take(name, image_size):
    with pytest.raises(TargetError, match="positive multiple of"):
        build(name, batch_size=1, image_size=image_size)


def test_batch_size_zero_is_refused():
    with pytest.raises(TargetError, match="at least 1, not 0"):
        build("tiny-bert-base", batch_size=0)


def test_an_unknown_name_is_answered_with_the_close_one_and_all():
    with pytest.raises(TargetError) as caught:
        find_entry("resnet-152")
    assert "did you mean 'resnet152'?" in str(caught.value)
    assert all(name in str(caught.value) for name in CATALOG)


def test_resnet152_has_its_152_layers():
    with torch.device("meta"):
        from lowtide.zoo.from_transformers import build_resnet

        model, _ = build_resnet(find_entry("resnet152"), 1)
    main_path = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.Linear) and "shortcut" not in name
    ]
    assert len(main_path) == 152


@pytest.mark.parametrize(
    ("text", "kind", "flags"),
    [
        ("adam", torch.optim.Adam, {"foreach": None, "fused": None}),
        ("adam:foreach", torch.optim.Adam, {"foreach": True}),
        ("adamw:fused", torch.optim.AdamW, {"fused": True}),
        ("sgd:single", torch.optim.SGD, {"foreach": False, "momentum": 0.9}),
    ],
)
def test_optimizers_by_name(text, kind, flags):
    optimizer = make_optimizer(text, torch.nn.Linear(2, 2))
    assert type(optimizer) is kind
    assert {key: optimizer.defaults[key] for key in flags} == flags


def test_no_optimizer():
    assert make_optimizer("none", torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize("text", ["", "rmsprop", "adam:quick", "none:fused", "adam:"])
def test_optimizers_that_cannot_be_read(text):
    if text == "adam:":
        assert type(make_optimizer(text, torch.nn.Linear(2, 2))) is torch.optim.Adam
        return
    with pytest.raises(TargetError, match="cannot read the optimizer"):
        make_optimizer(text, torch.nn.Linear(2, 2))


def test_missing_transformers_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without_transformers(name, *args, **kwargs):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named '{name}'", name="transformers")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_transformers)
    with pytest.raises(TargetError, match=r"pip install lowtide\[models\]"):
        build("tiny-bert-base", batch_size=1)


def test_quiet_leaves_nothing_behind(monkeypatch, capsys):
    from transformers.utils import logging

    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    logger = logging.get_logger("transformers.test")
    verbosity, filters = logging.get_verbosity(), list(warnings.filters)
    with quiet():
        logger.warning("chatter")
        warnings.warn("chatter", stacklevel=1)
    assert "chatter" not in capsys.readouterr().err
    assert logging.get_verbosity() == verbosity
    assert warnings.filters == filters
    assert "TRANSFORMERS_VERBOSITY" not in os.environ


def test_building_and_running_prints_nothing():
    code = (
        "from lowtide.zoo.build import build\n"
        "for name in ('tiny-gpt2', 'tiny-bert-base', 'tiny-resnet152'):\n"
        "    model, batch, _ = build(name, batch_size=2)\n"
        "    model(**batch).loss.backward()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout + run.stderr == ""
