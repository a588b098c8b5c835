"""What a step costs that recomputes nothing, where ops are small: a planned model beside eager.

Steps of both take turns in one process, on one thread; the toll is the median ratio of CPU seconds of two
steps that follow each other. `calls` are the Python calls of a step, which no noise changes.

    python bench/toll.py [t5 mlp resnet] [--pairs 200]
    python bench/toll.py t5 --cprofile 40            # what a planned step runs in Python
"""

import argparse
import copy
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lowtide


def t5() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=6, num_heads=4, decoder_start_token_id=0
    )
    tokens = torch.randint(1, 512, (4, 64))
    return T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens}


def mlp() -> tuple[nn.Module, dict[str, Any]]:
    layers = [layer for _ in range(40) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    return nn.Sequential(*layers), {"input": torch.randn(32, 64)}


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2])
    labels = torch.zeros(4, dtype=torch.int64)
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(4, 3, 64, 64), "labels": labels}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {"t5": t5, "mlp": mlp, "resnet": resnet}


def step_of(model: nn.Module, batch: dict[str, Any]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        output = model(**batch)
        loss = output.loss if hasattr(output, "loss") else output.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def calls(step: Callable[[], None]) -> int:
    profiler = cProfile.Profile()
    profiler.runcall(step)
    return int(pstats.Stats(profiler).total_calls)  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--cprofile", type=int, help="print so many functions of planned steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("model | eager ms | planned ms | toll | quartiles | calls in eager | planned")
    for name in options.models:
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        planned = copy.deepcopy(model.train())
        profile = lowtide.profile(planned, batch)
        profile.plan(4 * profile.peak_bytes, "none").apply(planned)
        steps = step_of(model, batch), step_of(planned, batch)
        for step in steps * 5:
            step()
        if options.cprofile:
            profiler = cProfile.Profile()
            for _ in range(20):
                profiler.runcall(steps[1])
            pstats.Stats(profiler).sort_stats("tottime").print_stats(options.cprofile)
            continue
        pairs = [(seconds(steps[0]), seconds(steps[1])) for _ in range(options.pairs)]
        ratios = sorted(one / other for other, one in pairs)
        low, middle, high = statistics.quantiles(ratios, n=4)
        eager, own = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
        counts = " | ".join(str(calls(step)) for step in steps)
        print(
            f"{name} | {eager:.2f} | {own:.2f} | {middle:.3f} | {low:.3f}-{high:.3f} | {counts}", flush=True
        )


if __name__ == "__main__":
    main()
