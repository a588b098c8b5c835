"""Private names and patches of torch, one file per subsystem; no other folder reads a private name of torch.

In the order in which a model passes them:

- `versions`: the versions of torch that all of this was checked with; importing anything here asks it
- `modules`: what a call of a module runs, and hooks around modules and optimizers
- `dynamo`: Dynamo, which traces Python code: compiled functions, settings, errors, log lines
- `dynamo_paths`: model code takes the path of eager under Dynamo, with few graph breaks
- `dynamo_values`: Python values that decide a graph: read from the batch, or changing from call to call
- `aot_autograd`: AOTAutograd, which makes a joint graph of forward and backward; graphs as functions
- `dispatch`: tensors, fake tensors and storages; modes, kernels and schemas of ops
- `inductor`: graphs that Inductor compiles, and calls in them that it leaves as they are
- `autograd_engine`: the backward pass that runs now, autocast, hooks of parameters
- `ddp`, `fsdp2`: models on several processes
"""

import torch

from lowtide.torch_compat.versions import check_version

check_version(torch.__version__)
