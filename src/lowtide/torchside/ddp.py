"""DistributedDataParallel's private names."""

from torch.nn.parallel import DistributedDataParallel


def active() -> DistributedDataParallel | None:
    """The wrapper whose forward runs now."""
    wrapper: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return wrapper
