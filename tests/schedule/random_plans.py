"""Random plans that are valid by the way they are made, and an executor written as plainly as can be."""

import random

from torchweave.schedule.action import COMPUTE, P2P, Action
from torchweave.schedule.plan import Plan, inputs_of, result_of


def random_plan(seed):
    """Return a valid plan: stages stand anywhere, and actions run in any order that their inputs allow."""
    draw = random.Random(seed)
    num_ranks, num_stages, num_microbatches = draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 5)
    homes = tuple(draw.randrange(num_ranks) for _ in range(num_stages))
    split = draw.random()
    left = []
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            kinds = "FIW" if draw.random() < split else "FB"
            left += [Action(stage, kind, microbatch) for kind in kinds]
    rows, done = [[] for _ in range(num_ranks)], set()
    while left:
        ready = [action for action in left if done.issuperset(inputs_of(action, num_stages))]
        action = draw.choice(ready)
        left.remove(action)
        done.add(result_of(action))
        rows[homes[action.stage]].append(action)
    return Plan("random", tuple(map(tuple, rows)), (homes,), num_microbatches)


def runs_to_its_end(plan):
    """Say whether every action can run, if a send and its receive wait for each other; by looking at all ranks."""
    has_p2p = any(action.kind in P2P for row in plan.ranks for action in row)
    rows, here = [list(row) for row in plan.ranks], [set() for _ in plan.ranks]
    steps = {"SEND_F": (1, "RECV_F", "F"), "SEND_B": (-1, "RECV_B", "I")}
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if not row:
                continue
            action = row[0]
            if action.kind in COMPUTE:
                known = here[rank] if has_p2p else set().union(*here)
                if all(known.issuperset(inputs_of(leaf, plan.num_stages)) for leaf in action.leaves()):
                    here[rank] |= {result_of(leaf) for leaf in action.leaves()}
                    row.pop(0)
                    moved = True
            elif action.kind in steps:
                step, receive, kind = steps[action.kind]
                result, wanted = (kind, *action[::2][:2]), Action(action.stage + step, receive, action.microbatch)
                peer = plan.rank_of(action.stage + step, action.microbatch)
                if result in here[rank] and rows[peer] and rows[peer][0] == wanted:
                    here[peer].add(result)
                    row.pop(0)
                    rows[peer].pop(0)
                    moved = True
    return not any(rows)
