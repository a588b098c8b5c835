import sys

import pytest
import torch

from lowtide.errors import TargetError
from lowtide.zoo.targets import TargetSpec, check_target, load_target

GOOD = """
import torch
import helper_of_target

CONSTANT = 3

def pair(batch_size):
    return torch.nn.Linear(4, 2), torch.randn(batch_size, 4)

def triple(batch_size):
    model, batch = pair(batch_size)
    return model, (batch,), torch.optim.SGD(model.parameters(), lr=0.1)

def quadruple(batch_size):
    return (*triple(batch_size), lambda output: output.sum())

def mapping(batch_size):
    import collections
    return torch.nn.Linear(4, 2), collections.UserDict(input=torch.randn(batch_size, 4))

def raises(batch_size):
    raise ValueError("no data\\nsecond line")

def leaves(batch_size):
    raise SystemExit(2)

def takes_nothing():
    return pair(1)

def one(batch_size):
    return pair(batch_size)[0]

def five(batch_size):
    return (1, 2, 3, 4, 5)

def not_a_model(batch_size):
    return "bert", torch.randn(2)

def not_a_batch(batch_size):
    return torch.nn.Linear(4, 2), 7

def not_an_optimizer(batch_size):
    return (*pair(batch_size), "adam")

def not_a_loss(batch_size):
    return (*pair(batch_size), None, 0.5)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_target.py").write_text(GOOD)
    (tmp_path / "helper_of_target.py").write_text("")
    (tmp_path / "broken_target.py").write_text("import torch\nraise RuntimeError('at import')\n")
    (tmp_path / "syntax_target.py").write_text("def make(:\n")
    (tmp_path / "needs_target.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.endswith("_target")]:
        del sys.modules[name]


@pytest.mark.parametrize("where", ["my_target.py", "./my_target.py", "my_target", "{folder}/my_target.py"])
def test_files_and_modules(folder, where):
    path = list(sys.path)
    target = load_target(where.format(folder=folder) + ":pair", batch_size=3)
    assert target.batch.shape == (3, 4)
    assert target.optimizer is None and target.loss is None
    assert sys.path == path


def test_a_batch_may_be_any_mapping(folder):
    assert load_target("my_target.py:mapping", batch_size=3).batch["input"].shape == (3, 4)


def test_what_can_be_found_without_making_it(folder):
    check_target("my_target.py:raises")
    check_target("tiny-gpt2")
    for text in ("my_target.py:nothing", "missing.py:make", "my_target.py", "tiny-gpt3"):
        with pytest.raises(TargetError):
            check_target(text)


def test_optimizer_and_loss_of_the_factory(folder):
    triple = load_target("my_target.py:triple", batch_size=2)
    assert isinstance(triple.optimizer, torch.optim.SGD) and triple.loss is None
    quadruple = load_target("my_target.py:quadruple", batch_size=2)
    assert quadruple.loss(torch.ones(3)) == 3


def test_an_optimizer_asked_for_wins(folder):
    assert isinstance(
        load_target("my_target.py:triple", batch_size=2, optimizer="adamw").optimizer, torch.optim.AdamW
    )
    assert load_target("my_target.py:triple", batch_size=2, optimizer="none").optimizer is None


def test_the_seed_decides_and_torch_is_left_alone(folder):
    state = torch.get_rng_state()
    first, again, other = (
        load_target("my_target.py:pair", batch_size=2, seed=seed).batch for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_built_in_names():
    target = load_target("tiny-transformer", batch_size=2, sequence_length=16)
    assert target.name == "tiny-transformer"
    assert target.batch["tokens"].shape == (2, 16)
    assert isinstance(target.optimizer, torch.optim.Adam)


def test_a_spec_loads_the_same_target():
    spec = TargetSpec(text="tiny-transformer", batch_size=2, sequence_length=16, optimizer="sgd", seed=3)
    direct = load_target("tiny-transformer", batch_size=2, sequence_length=16, optimizer="sgd", seed=3)
    loaded = spec.load()
    assert torch.equal(loaded.batch["tokens"], direct.batch["tokens"])
    assert type(loaded.optimizer) is type(direct.optimizer) is torch.optim.SGD


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("missing.py:make", "no such file: missing.py"),
        ("missing_module:make", "no such module: missing_module"),
        ("my_target.missing:make", "no such module: my_target.missing"),
        ("needs_target:make", "cannot import needs_target: ModuleNotFoundError"),
        ("needs_target.py:make", "cannot import needs_target.py: ModuleNotFoundError"),
        (
            "broken_target.py:make",
            "cannot import broken_target.py: RuntimeError: at import (broken_target.py:2)",
        ),
        ("syntax_target.py:make", "cannot import syntax_target.py: SyntaxError"),
        ("my_target.py:missing", "no factory 'missing' in my_target.py; there are pair, triple"),
        ("my_target.py:CONSTANT", "'CONSTANT' in my_target.py is not callable: it is of type int"),
        ("my_target.py:raises", "raised ValueError: no data (my_target.py:22)"),
        ("my_target.py:leaves", "raised SystemExit: 2"),
        ("my_target.py:takes_nothing", "must take one argument, the batch size"),
        ("my_target.py:one", "it returned a value of type Linear"),
        ("my_target.py:five", "it returned 5 values"),
        ("my_target.py:not_a_model", "the model is of type str"),
        ("my_target.py:not_a_batch", "the batch is of type int"),
        ("my_target.py:not_an_optimizer", "the optimizer is of type str"),
        ("my_target.py:not_a_loss", "the loss is of type float"),
        ("my_target.py", "does not say which function makes the model: write my_target.py:factory"),
        ("tiny-brt-base", "did you mean 'tiny-bert-base'?"),
    ],
)
def test_failures_are_told_apart_in_one_line(folder, text, message):
    with pytest.raises(TargetError) as caught:
        load_target(text, batch_size=2)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["my_target.py:raises", "broken_target.py:make", "needs_target:make"])
def test_the_users_own_exception_is_kept(folder, text):
    with pytest.raises(TargetError) as caught:
        load_target(text, batch_size=2)
    assert isinstance(caught.value.__cause__, ValueError | RuntimeError | ImportError)


def test_sizes_are_for_built_in_targets(folder):
    with pytest.raises(TargetError, match="are for built-in targets"):
        load_target("my_target.py:pair", batch_size=2, image_size=32)
