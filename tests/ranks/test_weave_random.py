"""Random chunks, crossings, groups and failures: bit-equal to serial, or an error of ours, and no hang.

A program is drawn from its number alone, alike on all ranks. `make test` runs a sample, `make test-long` thousands.
"""

from __future__ import annotations

import datetime
import random
import time
import traceback
from functools import partial
from typing import NamedTuple

import operations
import pytest
import torch
import torch.distributed as dist
from harness import Bomb, Cross, PlantedError, chain_of, check_equal, chunk, copied, pair_of, planted, remake_group
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchweave as tw
from torchweave.engine import pair as engine_of
from torchweave.errors import DeviationError, NotWeavableError, TorchweaveError

GROUP_TIMEOUT_S = 2.0
NUM_STEPS = 4
# a future is waited for outside of everything that weave sees, and a spinning wait never ends where a peer is missing
LEFT_OUT = ("by_future", "never_waited", "reduce")
OPERATIONS = [operation for operation in operations.OPERATIONS if operation.__name__ not in LEFT_OUT]


class Failure(NamedTuple):
    """What goes wrong: in which pair, in which strand, on which ranks, and how."""

    step: int
    strand: str
    ranks: tuple
    how: str


class Checkpointed(nn.Module):
    def __init__(self, module, reentrant):
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


def reduce_on(group, x):
    y = x.clone()
    dist.all_reduce(y, group=group)
    return y


def reduce_late_on(group, x):
    y = x.clone()
    work = dist.all_reduce(y, group=group, async_op=True)
    z = x.sin()
    work.wait()
    return y + z


class Program:
    """A maker of pairs, a strategy and perhaps a failure.

    Args:
        number: Everything is drawn from it.
        groups: Groups over the world, and one of this rank alone.
    """

    def __init__(self, number, groups):
        self._random = random.Random(number)
        self._groups = groups
        torch.manual_seed(number)
        self.number = number
        self.strategy = self._random.choice(("turns", "turns", "streams", "auto"))
        self.bombs = {"forward": Bomb(), "backward": Bomb()}
        self.text = []
        shape = self._random.choice(("two", "two", "chain", "same"))
        self.is_chain = shape == "chain"
        first = self._chunk(self.bombs["forward"])
        if shape == "two":
            self.chunks = [first, self._chunk(self.bombs["backward"])]
            self._make = partial(pair_of, *self.chunks)
        else:
            # one module in both strands has one bomb: it goes off in the strand that is armed
            self.chunks = [first]
            self.bombs["backward"] = self.bombs["forward"]
            self._make = partial(chain_of, first) if shape == "chain" else partial(pair_of, first, first)
        self.failure = self._draw_failure() if self._random.random() < 0.4 else None
        self.text = f"program {number}: {self.strategy}, {shape}, {' | '.join(self.text)}, {self.failure}"

    def _chunk(self, bomb):
        parts = [self._part() for _ in range(self._random.randint(0, 4))]
        parts.insert(self._random.randint(0, len(parts)), bomb)
        self.text.append(", ".join(getattr(part, "told", "bomb") for part in parts))
        return chunk(*parts)

    def _part(self, depth=0):
        kind = self._random.choice(("cross",) * 6 + ("dropout", "checkpoint", "group", "group", "lone"))
        if kind == "checkpoint" and depth < 2:
            reentrant = self._random.random() < 0.5
            inner = [self._part(depth + 1) for _ in range(self._random.randint(1, 2))]
            part = Checkpointed(chunk(*inner), reentrant)
            part.told = f"checkpoint({', '.join(one.told for one in inner)}, reentrant={reentrant})"
            return part
        if kind == "dropout":
            part = nn.Dropout(0.4)
            part.told = "dropout"
            return part
        if kind in ("group", "lone"):
            how = self._random.choice((reduce_on, reduce_late_on))
            part = Cross(partial(how, self._groups[kind]))
            part.told = f"{how.__name__} {kind}"
            return part
        operation = self._random.choice(OPERATIONS)
        part = Cross(operation)
        part.told = operation.__name__
        return part

    def _draw_failure(self):
        how = self._random.choice(("raise", "raise", "deviate"))
        return Failure(
            # what deviates in the first pair is the record
            self._random.randrange(how == "deviate", NUM_STEPS),
            self._random.choice(("forward", "backward")),
            self._random.choice(((0, 1), (0,), (1,))),
            how,
        )

    def results(self, run):
        """Run all pairs, each from zero gradients and a seed of its own; yield what each gave."""
        torch.manual_seed(self.number)
        pair = self._make()
        for step in range(NUM_STEPS):
            torch.manual_seed(50 * self.number + step)
            made = pair(step)
            for module in self.chunks:
                module.zero_grad()
            torch.manual_seed(self.number + step)
            yield run(step, made)

    def run_plainly(self, _, made):
        made.backward()
        output = made.forward()
        return copied([output, made.results(), torch.get_rng_state()])

    def run_woven(self, step, made):
        failure = self.failure
        armed = failure is not None and failure.step == step and dist.get_rank() in failure.ranks
        if armed:
            bomb = self.bombs[failure.strand]
            bomb.armed = failure.strand
            bomb.go_off = planted if failure.how == "raise" else deviate
        try:
            output = tw.weave(made.forward, made.backward, strategy=self.strategy)
            return "ok", copied([output, made.results(), torch.get_rng_state()])
        except BaseException as error:
            return error, "".join(traceback.format_exception(error))
        finally:
            if armed:
                bomb.armed = ""

    def check(self):
        """Raise unless every pair is equal or fails as it has to; return whether the group is broken now."""
        expected = list(self.results(self.run_plainly))
        dist.barrier()
        for step, (how, found) in enumerate(self.results(self.run_woven)):
            begin = time.monotonic()
            failure = self.failure if self.failure is not None and self.failure.step == step else None
            alone = failure is not None and len(failure.ranks) == 1
            told = f"rank {dist.get_rank()}, pair {step} of {self.text}"
            if isinstance(how, str):
                check_equal(expected[step], found, told)
            elif isinstance(how, NotWeavableError) and self.strategy != "auto":
                pass
            elif failure is None or not self._is_expected(how, failure):
                raise AssertionError(f"{told} raised:\n{found}")
            if alone:
                return True
            if failure is not None and self.is_chain:
                # the next backward would be of the forward that failed
                x = torch.full((3,), 2.0)
                dist.all_reduce(x)
                check_equal(torch.full((3,), 2.0 * dist.get_world_size()), x, f"the group after {told}")
                return False
            assert time.monotonic() - begin < 10 * GROUP_TIMEOUT_S, told
        return False

    def _is_expected(self, error, failure):
        here, alone = dist.get_rank() in failure.ranks, len(failure.ranks) == 1
        if here and failure.how == "raise":
            # where the failing rank's peer is the slower one, what it says may come first
            return isinstance(error, PlantedError)
        if here:
            return isinstance(error, DeviationError | NotWeavableError) or alone
        # without its record a pair runs untouched, and a missing peer is the backend's to tell
        return alone and isinstance(error, TorchweaveError | RuntimeError)


def deviate():
    x = torch.ones(3)
    dist.reduce(x, dst=0)


def make_groups():
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    return {"group": dist.new_group(timeout=timeout), "lone": dist.new_subgroups(1)[0]}


def run_programs(numbers, limit_s):
    """Run programs one after the other until the time is up; return how many ran."""
    groups, end, num_run = make_groups(), time.monotonic() + limit_s, 0
    root = dist.distributed_c10d._get_default_store()
    for number in numbers:
        if agreed_to_stop(root, number, time.monotonic() > end):
            break
        if Program(number, groups).check():
            # what a failure leaves behind in the engine is another test's: here programs are kept apart
            engine_of.engine().close()
            engine_of.engine.cache_clear()
            remake_group(GROUP_TIMEOUT_S, root, f"after {number}")
            groups = make_groups()
        num_run += 1
    return num_run


def agreed_to_stop(store, number, late):
    """Rank 0 alone looks at the clock."""
    if dist.get_rank() == 0:
        store.set(f"stop before {number}", "yes" if late else "no")
    store.wait([f"stop before {number}"], datetime.timedelta(seconds=30))
    return store.get(f"stop before {number}") == b"yes"


@pytest.mark.parametrize("first", range(0, 30, 6))
def test_random_programs(pool, first):
    """Catches what no hand-written case has: mixes of operations, groups, checkpoints and failures."""
    assert pool.run(run_programs, range(first, first + 6), 60.0, group_timeout_s=GROUP_TIMEOUT_S, timeout=90) == [6, 6]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(1000, 7000, 500))
def test_thousands_of_random_programs(pool, first):
    """Catches what thirty programs do not have; each of twelve parts has 110 s, and says how far it came."""
    done = pool.run(run_programs, range(first, first + 500), 110.0, group_timeout_s=GROUP_TIMEOUT_S, timeout=150)
    assert done[0] == done[1] > 20
    print(f"{done[0]} programs from {first}")
