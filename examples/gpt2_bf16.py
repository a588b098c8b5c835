"""GPT-2 from scratch under bf16 autocast, with batches of several lengths.

python examples/gpt2_bf16.py --budget 80% --batch-size 16 --lengths 64 48
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lowtide

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--budget", default="80%", help="bytes, a size (8GiB) or a share of the peak")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lengths", type=int, nargs="+", default=(64, 48), help="the longest first")
parser.add_argument("--layers", type=int, default=2, help="12 with --width 768 is GPT-2")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--vocabulary", type=int, default=256, help="50257 is GPT-2's")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(0)
heads = max(1, args.width // 64)
config = GPT2Config(vocab_size=args.vocabulary, n_layer=args.layers, n_embd=args.width, n_head=heads)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def text(length: int) -> dict[str, torch.Tensor]:
    """Stands for a data loader."""
    ids = torch.randint(0, config.vocab_size, (args.batch_size, length))
    return {"input_ids": ids, "labels": ids}


with torch.autocast("cpu", torch.bfloat16):  # planned as it trains
    profile = lowtide.profile(model, text(max(args.lengths)), optimizer=optimizer)
plan = profile.plan(args.budget)
plan.apply(model)
print(plan)

for step in range(args.steps):
    batch = text(args.lengths[step % len(args.lengths)])  # a new length gets a plan of its own
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
