"""An all-to-all over links that carry both directions: gloo's, and ours, which is ready to receive before it sends.

python benchmarks/links.py
python benchmarks/links.py --ranks 2 3 4 --speeds 100mbit 1gbit --megabytes 8 --rounds 7 --json links.json

Each rank has a host of its own (see `hosts.py`). The two ways take turns; a round is one exchange of each, of so many
megabytes on every rank. *link* is how long the bytes of one direction take. Needs root and iproute2.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import lockstep
from hosts import Host, hosts
from lockstep.collectives import open_group
from lockstep.collectives.all_reduce import wait_all
from lockstep.collectives.all_to_all import all_to_all
from lockstep.world import World

_PER_SECOND = {"mbit": 125e3, "gbit": 125e6}  # bytes, of the words that `tc` knows


def exchange(megabytes: float, rounds: int) -> dict[str, float]:
    """On a rank: the median milliseconds of each way. All ranks."""
    torch.set_num_threads(1)
    with closing(open_group(World.from_env(os.environ), torch.device("cpu"), 120)) as group:
        line = group.new_process_group()
        each = int(megabytes * 1e6) // 4 // group.size
        sizes = [each] * group.size
        sent, received = torch.zeros(each * group.size), torch.empty(each * group.size)
        took: dict[str, list[float]] = {"gloo": [], "lockstep": []}
        for _ in range(1 + rounds):  # the first opens connections
            for way, times in took.items():
                group.barrier("the next exchange")
                began = time.perf_counter()
                if way == "gloo":
                    dist.all_to_all_single(received, sent, sizes, sizes, group=line)
                else:
                    wait_all(all_to_all(received, sent, sizes, sizes, line))
                group.barrier("the end of the exchange")
                times.append(time.perf_counter() - began)
        return {way: median(times[1:]) * 1e3 for way, times in took.items()}


def visit(ranks: int, speed: str, options: argparse.Namespace) -> dict[str, float]:
    """What rank 0 of so many saw, each on a host with a link of ``speed``."""
    with hosts(ranks) as machines:
        places = [machines[f"n{number + 1}"] for number in range(ranks)]
        for place in places:
            place.slow(speed)
        worlds = [World(r, ranks, 0, 1, r, ranks, address="n1", port=29500) for r in range(ranks)]
        started = [_start(place, world, options) for place, world in zip(places, worlds, strict=True)]
        heard = [rank.communicate()[0] for rank in started]
    if any(rank.returncode for rank in started):
        sys.exit(f"{ranks} ranks at {speed} failed")
    found: dict[str, float] = json.loads(heard[0])
    return found


def _start(host: Host, world: World, options: argparse.Namespace) -> subprocess.Popen[str]:
    home = os.pathsep.join((str(Path(lockstep.__file__).parents[1]), str(Path(__file__).parent)))
    env = os.environ | {"PYTHONPATH": home, "OMP_NUM_THREADS": "1", **world.rank_variables()}
    told = ("--rank", "--megabytes", str(options.megabytes), "--rounds", str(options.rounds))
    return host.start([sys.executable, __file__, *told], cwd=Path.cwd(), env=env, stdout=subprocess.PIPE)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--speeds", nargs="+", default=["100mbit"], help="such as 100mbit or 1gbit")
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(exchange(options.megabytes, options.rounds)))
        return
    rows = []
    print("speed     ranks  link ms  gloo ms  lockstep ms  times as fast")
    for speed in options.speeds:
        for ranks in options.ranks:
            found = visit(ranks, speed, options)
            link = options.megabytes * 1e9 * (ranks - 1) / ranks / (float(speed[:-4]) * _PER_SECOND[speed[-4:]])
            rows.append({"speed": speed, "ranks": ranks, "link": link, **found})
            gloo, ours = found["gloo"], found["lockstep"]
            print(f"{speed:<9} {ranks:5} {link:8.0f} {gloo:8.0f} {ours:12.0f} {gloo / ours:14.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
