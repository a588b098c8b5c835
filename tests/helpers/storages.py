"""The live storages of this process."""

import gc

import torch


def storage_bytes() -> int:
    """Bytes of all storages behind the tensors that Python knows, each counted once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # by its type: asking a lazy module of somebody's for its class may import it
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            if storage.device.type != "meta":
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
