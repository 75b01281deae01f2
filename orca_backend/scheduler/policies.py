"""The parts of a scheduler, put together as the configuration names them."""

from __future__ import annotations

from orca_backend.config import SchedulerConfig
from orca_backend.scheduler.admission import Admission, Peak, Prompt, Reservation
from orca_backend.scheduler.kv_manager import KVManager
from orca_backend.scheduler.order import make_queue
from orca_backend.scheduler.pool import RequestPool
from orca_backend.scheduler.preemption import Recompute, Swap
from orca_backend.scheduler.scheduler import Scheduler
from orca_backend.scheduler.selection import SELECTIONS


def make_scheduler(
    config: SchedulerConfig,
    *,
    n_slots: int,
    block_size: int,
    max_model_len: int,
    prefix_cache: bool = False,
    swap_slots: int = 0,
) -> Scheduler:
    """A new scheduler of the policy that `config` names: an empty pool with every slot free.

    `n_slots` K/V slots (tokens) in blocks of `block_size`, and `swap_slots` in host memory; `max_model_len` bounds
    prompt plus generated tokens. Raises ValueError if the slots, or those for swapping, do not hold one block.
    """
    parts = config.parts
    kv = KVManager(n_slots, block_size, prefix_cache=prefix_cache)
    pool = RequestPool(make_queue(config, kv.cache))
    admissions: dict[str, Admission] = {
        "orca": Reservation(kv),
        "max": Reservation(kv, min(max_model_len, kv.n_slots)),
        "peak": Peak(kv, pool),
        "prompt": Prompt(kv, pool, config.watermark),
    }
    preemption = None
    if parts.preemption != "none":
        preemption = Swap(kv, swap_slots // block_size) if parts.preemption == "swap" else Recompute(kv)
    return Scheduler(
        config,
        max_model_len=max_model_len,
        pool=pool,
        kv=kv,
        admission=admissions[parts.admission],
        selection=SELECTIONS[parts.selection](),
        preemption=preemption,
    )
