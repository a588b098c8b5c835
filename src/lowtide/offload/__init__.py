"""Where offloaded values go: stores behind one small interface.

- `store`: what a store is, and what it gives for a value
- `disk`: a file without a name in a folder of the user's choice; for training on CPU
- `host`: pinned memory of the host; for training on an accelerator, not run so far
- `slots`: which part of a store belongs to whom
- `handles`: a stored value as a tiny tensor that graphs can pass on, and the ops on it
- `choice`: from `disk:/scratch` to a store
"""

from lowtide.offload.choose_store import open_store, warn_of_memory
from lowtide.offload.store import (
    OffloadHandle,
    Prefetch,
    Store,
    arrived,
    begin_to_leave,
    fetch,
    leave,
    number_of,
)

__all__ = [
    "OffloadHandle",
    "Prefetch",
    "Store",
    "arrived",
    "begin_to_leave",
    "fetch",
    "leave",
    "number_of",
    "open_store",
    "warn_of_memory",
]
