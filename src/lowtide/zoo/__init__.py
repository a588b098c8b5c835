"""What can be planned from the command line: built-in models with random weights, and the user's own.

- `targets`: from a TARGET as typed to a model, its batch, its optimizer and its loss
- `catalog`: the built-in ones and their options, without importing torch
- `build`: makes one, from `from_transformers`, `encoder` or `unet`
- `optimizers`: optimizers by name
- `quiet`: keeps libraries' chatter off the screen
"""

from lowtide.zoo.catalog import CATALOG, Entry, find_entry

__all__ = ["CATALOG", "Entry", "find_entry"]
