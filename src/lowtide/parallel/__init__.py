"""Several processes that train one model, each with a batch of its own: one plan for all of them.

`ranks`: who they are, and how they work and fail together. `agreement`: one plan, checked on every rank.
`buckets`: what sending gradients takes. `lost`: which rank failed, where others wait for it. torch's own
names for all this are in `torchside/ddp.py`; gradients leave a backward pass as they come by
`running/handover.py`.
"""
