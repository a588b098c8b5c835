"""Built-in targets: well-known models with random weights, a batch and an optimizer. No download.

`catalog` lists them and knows their options without importing torch; `build` makes one.
"""

from lowtide.zoo.catalog import CATALOG, Entry, find_entry

__all__ = ["CATALOG", "Entry", "find_entry"]
