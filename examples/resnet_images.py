"""Image classification with a ResNet, in a training loop of your own.

python examples/resnet_images.py --budget 80% --batch-size 64 --steps 5
"""

import argparse

import torch
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--budget", default="80%", help="bytes, a size (8GiB) or a share of the peak")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--size", type=int, default=32, help="of the images, in pixels")
parser.add_argument("--depths", type=int, nargs=4, default=(1, 1, 1, 1), help="3 8 36 3 is ResNet-152")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(0)
config = ResNetConfig(
    depths=list(args.depths), hidden_sizes=[32, 64, 128, 256], embedding_size=16, num_labels=10
)
model = ResNetForImageClassification(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for a data loader."""
    return torch.randn(args.batch_size, 3, args.size, args.size), torch.randint(0, 10, (args.batch_size,))


pixels, labels = images()
profile = lowtide.profile(
    model, pixels, optimizer=optimizer, loss=lambda output: F.cross_entropy(output.logits, labels)
)
plan = profile.plan(args.budget)
plan.apply(model)
print(plan)

for step in range(args.steps):
    pixels, labels = images()
    loss = F.cross_entropy(model(pixels).logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
