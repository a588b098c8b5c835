"""All that lowtide knows of torch's inside; no other folder reads a private name of torch.

- `hooks`: torch's private functions and classes, each behind a name of ours
- `dynamo`: the same for Dynamo, which follows Python code
- `tracing`: compile a function with our settings, which hold while torch traces
- `eager_paths`: model code that asks whether it is compiled goes the way it goes in eager
- `batch_values`: values of the batch that Python code reads, without a break in the graph
- `numbers`: Python numbers that change from call to call, as inputs of the graph
- `log_lines`: log lines of a forward, without a break in the graph
- `loops`: a break in the graph inside of a loop over modules
- `masked_writes`: a break in the graph where torch would only fail in the backward pass
- `outside`, `outside_watch`: what code between the graphs holds, found by walking or by watching
- `gradient_orders`: backward passes traced for gradients laid out as they will come
- `sharded`, `units`: modules that share parameters with other processes (FSDP2), each compiled apart
- `route`: where a call of a module goes
- `calls`: one call of an op, by the layouts of its tensors
- `ops`: ops that need more than their name, one file each
- `inductor`, `opaque`: graphs that Inductor compiles, and calls in them that it leaves as they are
- `checks`: checks of linear algebra are ops like others
- `batch`: how a model is called, and what a step differentiates
- `unprinted`: no text of graphs that nobody reads
- `garbage`: fewer searches for garbage while graphs are made
- `one_at_a_time`: threads that plan at the same time wait for each other
- `flops`: a counter of flops that other threads do not notice
- `first_calls`: first calls of mathematical functions, made where they do no harm
- `versions`: the versions of torch that all of this was checked with; importing anything here asks it
"""

import torch

from lowtide.torch_compat.versions import check_version

check_version(torch.__version__)
