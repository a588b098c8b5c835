"""The targets of the command line: built-in models with random weights, and the user's own.

- `targets`: the built-in targets; from a TARGET, as typed, to a model, its batch, its optimizer and its loss
- `build`: make a built-in target, with an optimizer by name; `from_transformers`: models of that library
- `decoders`: language models that can be divided along all dimensions of a mesh; `decoder_parts`: the part
  of one GPU; `mesh_ops`: its collectives, for tracing
- `placement`: the devices of this machine, and a target moved to one of them
"""

from lowtide.zoo.targets import CATALOG, Entry, find_entry

__all__ = ["CATALOG", "Entry", "find_entry"]
