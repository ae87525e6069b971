"""The parity check is worth something: it fails when any one collective is left out, or wrong in one of many ways."""

from collections import Counter
from contextlib import AbstractContextManager
from functools import partial

import pytest

from tests.functional import faults
from tests.functional.training import Clip, History, Recipe, disagreements, train_replicated, train_sharded
from tests.harness import run_ranks

GATHER, SCATTER, REDUCE = "all_gather over ", "reduce_scatter over ", "all_reduce over "

# Which collectives a run of each strategy is made of; both kinds of clip are covered, ours by its all-reduces of one number.
COLLECTIVES = {
    "no_shard": {REDUCE + "axis0"},
    "optim": {GATHER + "axis0", SCATTER + "axis0", REDUCE + "axis0"},
    "optim_grads": {GATHER + "axis0", SCATTER + "axis0", REDUCE + "axis0"},
    "optim_grads_params": {GATHER + "axis0", SCATTER + "axis0", REDUCE + "axis0"},
    "hsdp": {GATHER + "axis1", SCATTER + "axis1", REDUCE + "axis0", REDUCE + "axis1"},
    "hfsdp": {GATHER + "axis0", GATHER + "axis1", SCATTER + "axis0", SCATTER + "axis1", REDUCE + "axis0", REDUCE + "axis1"},
}

FAULTS = {
    "gather skipped": partial(faults.replaced, all_gather=faults.keep_own_shard),
    "gather in another order": partial(faults.replaced, all_gather=faults.gather_in_another_order),
    "gather of stale weights": lambda: faults.replaced(all_gather=faults.StaleGather()),
    "reduce-scatter without reduction": partial(faults.replaced, reduce_scatter=faults.keep_own_sum),
    "reduce-scatter of another slice": partial(faults.replaced, reduce_scatter=faults.scatter_another_slice),
    "reduce-scatter to one rank only": partial(faults.replaced, reduce_scatter=faults.scatter_to_one_rank),
    "all-reduce skipped": partial(faults.replaced, all_reduce=faults.keep_own_tensor),
    "all-reduce on one rank only": partial(faults.replaced, all_reduce=faults.reduce_on_one_rank),
    "all-reduce done twice": partial(faults.replaced, all_reduce=faults.reduce_twice),
    "division missing": faults.without_division,
    "later microbatches dropped": faults.without_later_microbatches,
    "earlier microbatches overwritten": faults.without_earlier_microbatches,
}
