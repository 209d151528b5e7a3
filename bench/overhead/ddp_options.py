"""What do static_graph and find_unused_parameters cost or spare in DDP? Processor time of a forward and a backward, in turn in one process.

    python bench/overhead/ddp_options.py [--layers 100] [--pairs 300]

A world of one rank on Gloo: what DDP itself does in a step, without the network. Each way has a copy of the same model, of many small
layers, where bookkeeping shows most; they take turns, and ratios are taken within a turn.
"""

import argparse
import copy
import random
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WAYS = {
    "as it is": {},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "both": {"find_unused_parameters": True, "static_graph": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=300)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net = nn.Sequential(*(part for _ in range(given.layers) for part in (nn.Linear(16, 16), nn.ReLU())))
    x = torch.randn(8, 16)
    models = {name: DistributedDataParallel(copy.deepcopy(net), **options) for name, options in WAYS.items()}
    for _ in range(5):
        for model in models.values():
            spent(model, x)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(given.pairs):
        for name in random.Random(turn).sample(list(WAYS), len(WAYS)):
            times[name].append(spent(models[name], x))
    print(f"{given.layers} layers, {2 * given.layers} parameters, {given.pairs} turns; torch {torch.__version__}\n")
    print("| DDP | ms of processor time, forward and backward | x as it is (quartiles) |\n|---|---|---|")
    for name in WAYS:
        low, middle, high = statistics.quantiles(
            [mine / base for mine, base in zip(times[name], times["as it is"], strict=True)], n=4
        )
        print(f"| {name} | {1e3 * statistics.median(times[name]):.2f} | {middle:.3f} ({low:.3f} to {high:.3f}) |")
    dist.destroy_process_group()


def spent(model: nn.Module, x: torch.Tensor) -> float:
    """Seconds of processor time of all threads, which backward uses too."""
    model.zero_grad(set_to_none=True)
    begun = time.process_time()
    model(x).square().mean().backward()
    return time.process_time() - begun


if __name__ == "__main__":
    main()
