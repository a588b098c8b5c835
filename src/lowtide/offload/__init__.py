"""Offload stores: where values wait outside of device memory until they are used again.

- `offload_store`: what a store is, how one is opened, and the ops of graphs that offload and prefetch
- `disk_store`: an unnamed file in a folder that the user chooses; for training on CPU
- `host_store`: pinned memory of the host; for training on an accelerator
- `resting_tensor`: tensors of the user that rest on a store between their uses
- `fetched_weight`: the ops of graphs that read a resting weight
"""
