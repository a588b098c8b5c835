"""Names, descriptions and options of the built-in targets. Does not import torch."""

import difflib
from dataclasses import dataclass, replace

from lowtide.errors import TargetError


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
        """This entry at the asked size; an option that does not apply is an error that says which does."""
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
