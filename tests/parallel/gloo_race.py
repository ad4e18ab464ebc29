"""python gloo_race.py [--limited] [--gathers=N]: all-gathers of one process, on plain torch unless --limited.

torch 2.13's gloo group has two threads. Each stores the name of the operation that it completed in one std::string,
without a lock. "ALLGATHER_COALESCED" does not fit into the string itself, so both free its memory now and then:
"free(): double free detected", "malloc(): unaligned tcache chunk detected", or a segmentation fault somewhere else.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

if "--limited" in sys.argv:
    from titan.parallel.torch_compat import limit_gloo

    limit_gloo(loopback=True)
gathers = int(sys.argv[-1].removeprefix("--gathers="))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
world = dist.group.WORLD
assert world is not None
if "--limited" in sys.argv:
    backend: Any = world._get_backend(torch.device("cpu"))
    assert backend.options._threads == 1, backend.options._threads
gather = torch.ops._c10d_functional.all_gather_into_tensor
wait = torch.ops._c10d_functional.wait_tensor
x = torch.ones(4)
for _ in range(gathers // 4):
    for y in [gather(x, 1, world.group_name) for _ in range(4)]:
        wait(y)
os._exit(0)
