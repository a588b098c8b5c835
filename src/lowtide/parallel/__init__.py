"""Several processes that train one model: DistributedDataParallel, FSDP2, tensor parallelism, pipelines, or a
simulation of FSDP2.

Each file belongs to a stage of the data flow, and imports only from this stage and those before it:

- `exchange` (planning): what a process allocates to exchange parameters and gradients
- `microbatches` (trace): micro-batches in flight, by the schedule of a pipeline
- `simulated_sharding` (trace): how FSDP2 would shard a model over absent processes
- `fsdp_units` (trace): compile a sharded model unit by unit
- `sharded_step` (analyze): a captured step with shards and exchanges
- `ranks` (plans): the processes that train a model, one plan for all, buckets of DistributedDataParallel
- `rank_failure` (runtime): name the rank that failed in a step
"""
