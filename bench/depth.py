"""What setting up a plan costs as a model gets deeper: CPU seconds of one thread, for equal blocks.

Every model is tiny in width, so that its ops cost next to nothing, and set up in a fresh process. `aot_eager`
is the first step of `torch.compile(model, backend="aot_eager")` in another process.

    python bench/depth.py --layers 12 24 48 96 [--model llama|gpt2] [--budget 60%] [-o depth.csv]
    python bench/depth.py --layers 24 --cprofile 60      # where the seconds of one set-up go
"""

import argparse
import cProfile
import csv
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COLUMNS = ("model", "layers", "capture", "costs", "plan", "apply", "first_step", "total", "aot_eager")
Seconds = dict[str, float]


def llama(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def gpt2(layers: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=layers, n_head=4, n_positions=64, use_cache=False)
    return GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[int], Any]] = {"llama": llama, "gpt2": gpt2}


def loaded(name: str, layers: int) -> tuple[Any, dict[str, Any], Any]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MODELS[name](layers).train()
    tokens = torch.randint(0, 64, (8, 32))
    return model, {"input_ids": tokens, "labels": tokens}, torch.optim.AdamW(model.parameters())


@contextmanager
def timed(seconds: Seconds, name: str) -> Iterator[None]:
    start = time.process_time()
    yield
    seconds[name] = time.process_time() - start


def set_up(name: str, layers: int, budget: str) -> Seconds:
    from lowtide.analyze.captured_step import capture
    from lowtide.profiles import Profile
    from lowtide.profiling.costing import measure_costs

    warm_up(name)
    model, batch, optimizer = loaded(name, layers)
    seconds: Seconds = {}
    with timed(seconds, "capture"):
        captured = capture(model, batch, optimizer=optimizer)
    with timed(seconds, "costs"):
        step, known = measure_costs(captured)
    with timed(seconds, "plan"):
        plan = Profile(step, known, traced=captured.traced).plan(budget)
    with timed(seconds, "apply"):
        plan.apply(model)
    with timed(seconds, "first_step"):
        model(**batch).loss.backward()
        optimizer.step()
    return seconds | {"total": sum(seconds.values())}


def aot_eager(name: str, layers: int, _: str) -> Seconds:
    import torch

    warm_up(name)
    model, batch, optimizer = loaded(name, layers)
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    seconds: Seconds = {}
    with timed(seconds, "aot_eager"):
        compiled(**batch).loss.backward()
        optimizer.step()
    return seconds


def warm_up(name: str) -> None:
    """Import what torch and lowtide import while they work, and remember the costs of the ops."""
    import lowtide

    model, batch, optimizer = loaded(name, 1)
    lowtide.checkpoint(model, batch, budget="95%", optimizer=optimizer)
    model(**batch).loss.backward()
    optimizer.step()


PARTS = {"lowtide": set_up, "aot": aot_eager}


def measure(name: str, layers: int, budget: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "layers": layers}
    for part in PARTS:
        command = [sys.executable, __file__, "--model", name, "--layers", str(layers), "--budget", budget]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(
            [*command, "--child", part], stdout=subprocess.PIPE, text=True, check=True, env=one_thread
        )
        row |= json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--layers", nargs="*", type=int, default=[12, 24, 48, 96])
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--cprofile", type=int, help="print so many functions of one set-up")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(PARTS[options.child](options.model, options.layers[0], options.budget)))
        return
    if options.cprofile:
        profiler = cProfile.Profile(time.process_time)
        found = profiler.runcall(set_up, options.model, options.layers[0], options.budget)
        print(found)
        for order in ("cumulative", "tottime"):
            pstats.Stats(profiler).sort_stats(order).print_stats(options.cprofile)
        return
    rows = []
    print(" | ".join(COLUMNS))
    for layers in options.layers:
        rows.append(measure(options.model, layers, options.budget))
        cells = [rows[-1][column] for column in COLUMNS]
        print(
            " | ".join(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells), flush=True
        )
    if options.output:
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
