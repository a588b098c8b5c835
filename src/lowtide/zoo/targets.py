"""From a TARGET, as written on the command line, to a model, its batch, its optimizer and its loss.

A TARGET is a built-in name (`bert-base`), `file.py:factory` or `package.module:factory`. A factory
is called with the batch size and returns `(model, batch)`, `(model, batch, optimizer)` or
`(model, batch, optimizer, loss)`. Every failure is a `TargetError` of one line; where the user's own
code raised, that exception is its `__cause__`. torch is imported only to load, not to read, a TARGET.
`CATALOG` has the names, descriptions and options of the built-in targets.
"""

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lowtide.errors import TargetError

if TYPE_CHECKING:
    import torch

    Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Entry:
    """A built-in target.

    `family` names the function that builds it. Of `image_size` and `sequence_length`, the one that is not
    None is an option of this target, and its value the default; `multiple_of` must divide it.
    """

    name: str
    family: str
    summary: str
    image_size: int | None = None
    sequence_length: int | None = None
    multiple_of: int = 1
    tiny: bool = False

    @property
    def option(self) -> str:
        """The size that can be chosen: `image_size` or `sequence_length`."""
        return "image_size" if self.image_size is not None else "sequence_length"

    def with_size(self, *, image_size: int | None, sequence_length: int | None) -> "Entry":
        """This entry at the asked size; an error where the option does not apply."""
        for option, value in (("image_size", image_size), ("sequence_length", sequence_length)):
            if value is None:
                continue
            if option != self.option:
                raise TargetError(
                    f"'{self.name}' has no {_words(option)}; the size that can be chosen is "
                    f"its {_words(self.option)} (--{self.option.replace('_', '-')})"
                )
            if value < 1 or value % self.multiple_of:
                raise TargetError(
                    f"the {_words(option)} of '{self.name}' must be a positive multiple of "
                    f"{self.multiple_of}, not {value}"
                )
        return replace(
            self,
            image_size=image_size or self.image_size,
            sequence_length=sequence_length or self.sequence_length,
        )


def find_entry(name: str) -> Entry:
    """The built-in target of that name; an unknown name gets the closest one suggested, and all listed."""
    if name in CATALOG:
        return CATALOG[name]
    close = difflib.get_close_matches(name, CATALOG, n=1)
    suggestion = f"did you mean '{close[0]}'? " if close else ""
    raise TargetError(
        f"no built-in target '{name}': {suggestion}there are {', '.join(CATALOG)}; "
        "a model of your own is written file.py:factory or package.module:factory"
    )


def _words(option: str) -> str:
    return option.replace("_", " ")


_FULL = (
    Entry("resnet152", "resnet", "ResNet-152, 1,000 classes, batch norm", image_size=224),
    Entry("bert-base", "bert", "BERT-base, sequence classification, dropout", sequence_length=128),
    Entry("bert-base-mlm", "bert-mlm", "BERT-base, masked language model, dropout", sequence_length=128),
    Entry(
        "transformer",
        "transformer",
        "6-layer encoder, d 512, feed-forward 2048, vocabulary 30,000, dropout",
        sequence_length=128,
    ),
    Entry("gpt2", "gpt2", "GPT-2 small, language model, dropout", sequence_length=128),
    Entry("vit", "vit", "ViT-base, patches of 16, 1,000 classes", image_size=224, multiple_of=16),
    Entry(
        "unet",
        "unet",
        "U-Net, 4 levels, long skips, batch norm, a class per pixel",
        image_size=256,
        multiple_of=32,
    ),
)


def _tiny(entry: Entry) -> Entry:
    return replace(
        entry,
        name=f"tiny-{entry.name}",
        summary=f"the structure of {entry.name}, small enough for tests",
        image_size=None if entry.image_size is None else 64,
        sequence_length=None if entry.sequence_length is None else 32,
        multiple_of=8 if entry.family == "vit" else entry.multiple_of,
        tiny=True,
    )


CATALOG: dict[str, Entry] = {entry.name: entry for entry in (*_FULL, *map(_tiny, _FULL))}


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a training step. `batch`: a tensor or tuple (positional) or a dict (keywords).

    `holds_outputs`: whether the loop keeps the model's outputs besides the loss live until the next forward
    pass ends.
    `within` makes the context of each forward pass, such as a block of autocast.
    """

    name: str
    model: "torch.nn.Module"
    batch: Any
    optimizer: "torch.optim.Optimizer | None" = None
    loss: "Loss | None" = None
    holds_outputs: bool = True
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """How to load a target: enough to make the same one again in another process.

    `optimizer` is a name that `lowtide.zoo.build.make_optimizer` reads. None means `adam` for a
    built-in target, and for a factory whatever it returns. `device` is one of this machine, as torch names
    it; None means the CPU for a built-in target, and for a factory wherever it puts its model.
    """

    text: str
    batch_size: int
    image_size: int | None = None
    sequence_length: int | None = None
    optimizer: str | None = None
    seed: int = 0
    device: str | None = None

    def load(self) -> Target:
        """The same fields give the same weights and batch in any process."""
        from lowtide.zoo.placement import device_named

        device = None if self.device is None else device_named(self.device)
        where, colon, factory_name = _parts(self.text)
        if colon:
            if self.image_size is not None or self.sequence_length is not None:
                raise TargetError(
                    "image size and sequence length are for built-in targets; "
                    f"'{self.text}' makes its own batch"
                )
            with _importable(where):
                factory = _find_factory(where, factory_name)
                target = call_factory(
                    factory, self.text, batch_size=self.batch_size, seed=self.seed, device=device
                )
            return _with_optimizer(_on(target, device), self.optimizer)
        check_target(self.text)
        from lowtide.zoo.build import build

        options = asdict(self) | {"optimizer": self.optimizer or "adam", "device": device or "cpu"}
        built = build(options.pop("text"), **options)
        return Target(self.text, built.model, built.batch, built.optimizer)


def load_target(text: str, **options: Any) -> Target:
    """`TargetSpec(text=text, ...).load()`."""
    return TargetSpec(text=text, **options).load()


def check_target(text: str) -> None:
    """Raise a TargetError unless `text` names a target that can be loaded; no model is made yet."""
    where, colon, factory_name = _parts(text)
    if colon:
        with _importable(where):
            _find_factory(where, factory_name)
    elif text.endswith(".py") or "/" in text:
        raise TargetError(f"'{text}' does not say which function makes the model: write {text}:factory")
    else:
        find_entry(text)


def _parts(text: str) -> tuple[str, str, str]:
    if "\0" in text:
        raise TargetError(f"no such file: {text!r}")
    return text.rpartition(":")


def _find_factory(where: str, factory_name: str) -> Callable[[int], Any]:
    module = _import_file(Path(where)) if where.endswith(".py") or "/" in where else _import_module(where)
    if not hasattr(module, factory_name):
        functions = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        ]
        there = f": define {factory_name}(batch_size), which returns (model, batch, optimizer, loss)"
        if functions:
            there = f"; there are {', '.join(functions)}"
        raise TargetError(f"no factory '{factory_name}' in {where}{there}")
    factory = getattr(module, factory_name)
    if not callable(factory):
        raise TargetError(f"'{factory_name}' in {where} is not callable: it is of type {_type_name(factory)}")
    return factory  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # not a valid file name
        is_file = False
    if not is_file:
        raise TargetError(f"no such file: {path}")
    path = path.resolve()
    # Under its own name, as `import` would have it, so that its classes can be pickled; a name that
    # is taken by another module gets a prefix.
    name = path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name = f"lowtide_target_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise TargetError(f"cannot import {path.name}: {_one_line(error)}") from error
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise TargetError(f"no such module: {name} (looked in the current folder, too)") from None
        raise TargetError(f"cannot import {name}: {_one_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"cannot import {name}: {_one_line(error)}") from error


def call_factory(
    factory: Callable[..., Any],
    text: str,
    *,
    batch_size: int,
    seed: int,
    device: "torch.device | None" = None,
) -> Target:
    """What the factory makes. It is told of a `device` that was asked for if it has a parameter `device`."""
    from lowtide.zoo.placement import seeded

    given: dict[str, Any] = {}
    try:
        inspect.signature(factory).bind(batch_size)
        if device is not None and "device" in inspect.signature(factory).parameters:
            given["device"] = device
    except TypeError:
        raise TargetError(f"the factory {text} must take one argument, the batch size") from None
    except ValueError:
        pass  # a callable without a signature: only a call can tell
    with seeded(seed):
        try:
            returned = factory(batch_size, **given)
        except (Exception, SystemExit) as error:
            raise TargetError(f"the factory {text} raised {_one_line(error)}") from error
    wrong = _what_is_wrong(returned)
    if wrong:
        raise TargetError(
            f"the factory {text} must return (model, batch), (model, batch, optimizer) or "
            f"(model, batch, optimizer, loss), but {wrong}"
        )
    return Target(text, *returned)


def _what_is_wrong(returned: Any) -> str:
    """Why a factory's return value cannot be used, in words; empty when it can."""
    import torch

    if not isinstance(returned, tuple | list):
        return f"it returned a value of type {_type_name(returned)}"
    if not 2 <= len(returned) <= 4:
        return f"it returned {len(returned)} values"
    model, batch, optimizer, loss = (*returned, None, None)[:4]
    if not isinstance(model, torch.nn.Module):
        return f"the model is of type {_type_name(model)}, not a torch.nn.Module"
    if not isinstance(batch, torch.Tensor | tuple | list | Mapping):
        return f"the batch is of type {_type_name(batch)}, not a tensor, a tuple or a dict"
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        return f"the optimizer is of type {_type_name(optimizer)}, not a torch.optim.Optimizer"
    if loss is not None and not callable(loss):
        return f"the loss is of type {_type_name(loss)}, which is not callable"
    return ""


def _on(target: Target, device: "torch.device | None") -> Target:
    """The target on another device, with the state of its optimizer; None leaves it where it is."""
    if device is None:
        return target
    from lowtide.zoo.placement import move_model, moved

    model = move_model(target.model, target.optimizer, device)
    return replace(target, model=model, batch=moved(target.batch, device), loss=moved(target.loss, device))


def _with_optimizer(target: Target, optimizer: str | None) -> Target:
    """An optimizer given by name replaces the factory's own."""
    if optimizer is None:
        return target
    from lowtide.zoo.build import make_optimizer

    return replace(target, optimizer=make_optimizer(optimizer, target.model))


@contextmanager
def _importable(where: str) -> Iterator[None]:
    """Let the target import its neighbours, as with `python file.py` and `python -m module`."""
    folder = str(Path(where).resolve().parent) if where.endswith(".py") or "/" in where else str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _one_line(error: BaseException) -> str:
    """`ValueError: text (file.py:12)`: the first line of the message, and where the user's code raised it."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if isinstance(error, SyntaxError):
        return text
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    return f"{text} ({Path(frames[0].filename).name}:{frames[0].lineno})" if frames else text


def _is_ours(filename: str) -> bool:
    return filename in (__file__, importlib.__file__) or filename.startswith("<frozen importlib")


def _type_name(value: Any) -> str:
    return "None" if value is None else type(value).__name__
