"""The weights of a planned model that rest on the store, from `open` to `close`.

    open      every weight of the plan is written to the store, and its memory is free
    a call    graphs fetch weights; the user's own code reads and writes them as ever
    refresh   a weight that the user gave other memory since (`weight.data = other`) is laid to rest again,
              and one that a failed write has torn may be read where the user wrote other values since
    close     every weight is back in memory

The user's tensors stay the same objects. Where something fails halfway, those laid to rest so far return.
"""

import torch
from torch import Tensor, nn

from lowtide.errors import StoreError
from lowtide.offload.offload_store import OffloadStore, RestingTensor, resting_of
from lowtide.planning.resting_weights import WEIGHTS
from lowtide.torch_compat.dispatch import has_other_owners


class RestingWeights:
    """The weights `resting` (names of `Solution.resting`) of a model, on `store`."""

    def __init__(self, model: nn.Module, resting: tuple[str, ...], store: OffloadStore) -> None:
        self._store = store
        self._places = [_place(model, name) for name in weight_names(resting)]
        self._names = weight_names(resting)
        self._resting: dict[str, RestingTensor] = {}
        self._is_read_outside = False
        self._written = {name.partition(":")[2] for name in resting if name.startswith("parameters:")}
        """by the optimizer, so that pages of them are in memory after each step"""

    def open(self) -> None:
        """Lay all weights to rest."""
        try:
            for name, (module, attribute) in zip(self._names, self._places, strict=True):
                self._lay(name, _tensor(module, attribute))
        except BaseException:
            self.close()
            raise

    def _lay(self, name: str, tensor: Tensor) -> None:
        known = resting_of(tensor)  # a weight that another planned model has, too
        if known is None:
            if has_other_owners(tensor):
                raise StoreError(
                    f"'{name}' cannot rest on '{self._store.text}', since another tensor shares its memory, "
                    "such as a view that you keep: drop that tensor, or leave 'frozen' and 'parameters' out "
                    "of offload_what"
                )
            known = self._store.rest(tensor, name)
        self._resting[name] = known

    def read_outside(self) -> None:
        """Code without a plan is about to read the weights where they rest."""
        self._is_read_outside = True

    def refresh(self) -> None:
        """Lay weights to rest again that have other memory now. Give the system its pages back."""
        for name, (module, attribute) in zip(self._names, self._places, strict=True):
            tensor = _tensor(module, attribute)
            if not self._resting[name].is_of(tensor):
                self._lay(name, tensor)
            self._resting[name].look_after(tensor)
        for name, resting in self._resting.items():
            if self._is_read_outside or name in self._written:
                resting.drop_pages()
        self._is_read_outside = False

    def close(self) -> None:
        """Return all weights to memory."""
        for name, (module, attribute) in zip(self._names, self._places, strict=True):
            tensor = _tensor(module, attribute)
            resting = self._resting.pop(name, None)
            if resting is not None and resting.is_of(tensor):
                resting.return_to_memory(tensor, torch.device("cpu"))


def weight_names(resting: tuple[str, ...]) -> list[str]:
    """The weights among what rests, by their names in the model."""
    pairs = (text.partition(":") for text in resting)
    return [name for word, _, name in pairs if word in WEIGHTS]


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a weight, and the name of the weight there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _tensor(module: nn.Module, attribute: str) -> Tensor:
    tensor = getattr(module, attribute)
    assert isinstance(tensor, Tensor)
    return tensor
