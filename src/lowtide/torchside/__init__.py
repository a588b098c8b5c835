"""Everything that is particular to torch. Importing any of it checks torch's version first."""

import torch

from lowtide.torchside.versions import check_version

check_version(torch.__version__)
