"""Every way to communicate that a strand may use: functions from a tensor to one of the same shape."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import torchweave as tw


def _ends():
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, (rank + 1) % size, (rank - 1) % size


def all_to_all_single(x):
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x)
    return y


def uneven_all_to_all(x):
    """The first half of the ranks sends one row to everybody else less than it could."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # splits[i][j]: rows from i to j; every rank sends all of its rows, receives rows in another number
    rows = x.shape[0]
    splits = [[0] * size for _ in range(size)]
    for source in range(size):
        splits[source][source] = 1
        splits[source][(source + 1) % size] += rows - 1 if source == 0 else 1
        splits[source][0] += rows - sum(splits[source])
    send, receive = splits[rank], [splits[source][rank] for source in range(size)]
    y = x.new_zeros(sum(receive), x.shape[1])
    dist.all_to_all_single(y, x, receive, send)
    back = torch.empty_like(x)
    dist.all_to_all_single(back, y * 1.5, send, receive)
    return back


def all_reduce(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


def late_wait(x):
    y = x.clone()
    work = dist.all_reduce(y, async_op=True)
    z = x * 2 + x.sin()
    work.wait()
    return y + z


def two_in_flight(x):
    y, z = x.clone(), x.cos()
    first = dist.all_reduce(y, async_op=True)
    second = dist.all_reduce(z, op=dist.ReduceOp.MAX, async_op=True)
    second.wait()
    first.wait()
    return y * z


def never_waited(x):
    y, z = x.clone(), x.clone()
    kept = dist.all_reduce(z, async_op=True)
    dist.all_reduce(y)  # on one communicator, behind the first
    while not kept.is_completed():
        pass
    return y + z


def waited_twice(x):
    y = x.clone()
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    work.wait()
    return y


def by_future(x):
    y = x.clone()
    dist.all_reduce(y, async_op=True).get_future().wait()
    return y


def all_gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return sum(part * (i + 1) for i, part in enumerate(parts))


def all_gather_into_tensor(x):
    y = x.new_empty(dist.get_world_size() * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(y, x)
    return (
        y.view(dist.get_world_size(), *x.shape)
        .mul(torch.arange(2.0, 2.0 + dist.get_world_size(), device=x.device)[:, None, None])
        .sum(0)
    )


def reduce_scatter_tensor(x):
    y = torch.empty_like(x)
    dist.reduce_scatter_tensor(y, torch.cat([x * (i + 1) for i in range(dist.get_world_size())]))
    return y


def reduce_scatter(x):
    y = torch.empty_like(x)
    dist.reduce_scatter(y, [x * (i + 1) for i in range(dist.get_world_size())])
    return y


def broadcast(x):
    y = x.clone()
    dist.broadcast(y, src=1)
    return y + x


def reduce(x):
    y = x.clone()
    dist.reduce(y, dst=0)
    return y if dist.get_rank() == 0 else x * 0.5


def gather_scatter(x):
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
    dist.gather(x, parts, dst=0)
    if parts is not None:
        parts = [part * (i + 2) for i, part in enumerate(parts)]
    y = torch.empty_like(x)
    dist.scatter(y, parts, src=0)
    return y


def all_gather_object(x):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"mean": x.mean().item(), "rank": dist.get_rank()})
    return x + sum(item["mean"] * (item["rank"] + 1) for item in found)


def broadcast_object_list(x):
    things = [x.sum().item() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(things, src=0)
    return x * 0.1 + things[0]


def barrier(x):
    dist.barrier()
    return x * 2


def monitored_barrier(x):
    # without one its limit is 30 minutes, whatever the group's is: too long for a program whose peer has failed
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))
    return x * 2


def all_to_all(x):
    parts = [torch.empty_like(part) for part in x.chunk(dist.get_world_size())]
    dist.all_to_all(parts, [part.contiguous() for part in x.chunk(dist.get_world_size())])
    return torch.cat(parts)


def gather_object(x):
    found = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(x.mean().item(), found, dst=0)
    told = [None]
    dist.scatter_object_list(told, found, src=0)
    return x + told[0]


def send_recv(x):
    rank, right, left = _ends()
    y = torch.empty_like(x)
    if rank % 2 == 0:
        dist.send(x, right)
        dist.recv(y, left)
    else:
        dist.recv(y, left)
        dist.send(x, right)
    return y


def isend_irecv(x):
    _, right, left = _ends()
    y = torch.empty_like(x)
    works = [dist.isend(x, right), dist.irecv(y, left)]
    z = x.exp()
    for work in works:
        work.wait()
    return y + z


def batch_isend_irecv(x):
    _, right, left = _ends()
    y = torch.empty_like(x)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]):
        work.wait()
    return y


def one_sided(x):
    """Only rank 0 sends, only rank 1 receives: the ranks' records differ, and still fit together."""
    if dist.get_rank() == 0:
        dist.send(x, 1)
        return x
    y = x.clone()
    if dist.get_rank() == 1:
        dist.recv(y, 0)
    return y * 0.5


def coalesced_all_reduce(x):
    y, z = x.clone(), x.sin()
    with dist._coalescing_manager():
        dist.all_reduce(y)
        dist.all_reduce(z)
    return y - z


def coalesced_async(x):
    y, z = x.clone(), x.sin()
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(y)
        dist.all_reduce(z)
    w = x.cos()
    manager.wait()
    return y - z + w


def functional_all_reduce(x):
    return funcol.all_reduce(x, "sum", dist.group.WORLD) * 0.5


def functional_late(x):
    y = funcol.all_reduce(x, "sum", dist.group.WORLD)
    z = x * 3
    return z + y


def functional_gather(x):
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD).view(dist.get_world_size(), *x.shape).prod(0)


def functional_all_to_all(x):
    rows = [x.shape[0] // dist.get_world_size()] * dist.get_world_size()
    return funcol.all_to_all_single(x, rows, rows, dist.group.WORLD) + 0.0


def functional_coalesced(x):
    y, z = funcol.all_reduce_coalesced([x, x.sin()], "sum", dist.group.WORLD)
    return y + 2 * z


def functional_no_grad(x):
    with torch.no_grad():
        return x + funcol.all_reduce(x, "max", dist.group.WORLD)


def functional_inference(x):
    with torch.inference_mode():
        y = funcol.all_reduce(x * 1.0, "max", dist.group.WORLD) + 0
        mean = y.mean().item()
    return x * mean


def region(x):
    """Communication that torch.distributed knows nothing of."""
    import time

    with tw.communication():
        time.sleep(0.001)
    return x.flip(0)


def region_with_tensor(x):
    with tw.communication(x):
        y = x.numpy().copy()
    return torch.from_numpy(y) * 2


# by name; the value says how `turns`, `streams` and `auto` run a pair of two chunks with two of them each
WOVEN = {"turns": "woven", "streams": "woven", "auto": "woven"}
NO_STREAMS = {**WOVEN, "streams": "refused"}
OPERATIONS = {
    all_to_all_single: WOVEN,
    uneven_all_to_all: WOVEN,
    all_reduce: WOVEN,
    late_wait: WOVEN,
    two_in_flight: WOVEN,
    never_waited: WOVEN,
    waited_twice: WOVEN,
    by_future: {**WOVEN, "auto": "serial"},  # a future is not seen: there is no crossing to hide anything behind
    all_gather: WOVEN,
    all_gather_into_tensor: WOVEN,
    reduce_scatter_tensor: WOVEN,
    reduce_scatter: NO_STREAMS,  # gloo carries it out by more operations than are seen
    broadcast: WOVEN,
    reduce: WOVEN,
    gather_scatter: WOVEN,
    all_gather_object: WOVEN,
    broadcast_object_list: WOVEN,
    barrier: WOVEN,
    monitored_barrier: {**NO_STREAMS, "auto": "serial"},  # it blocks by itself, and hands out no Work to wait for
    all_to_all: WOVEN,
    gather_object: WOVEN,
    send_recv: WOVEN,
    isend_irecv: WOVEN,
    batch_isend_irecv: WOVEN,
    one_sided: WOVEN,
    # the list of a coalescing block is per group and not per thread
    coalesced_all_reduce: NO_STREAMS,
    coalesced_async: NO_STREAMS,
    functional_all_reduce: WOVEN,
    functional_late: WOVEN,
    functional_gather: WOVEN,
    functional_all_to_all: WOVEN,
    functional_coalesced: WOVEN,
    functional_no_grad: WOVEN,
    functional_inference: WOVEN,
    region: WOVEN,
    region_with_tensor: WOVEN,
}

# over NCCL, where each family shares a job: communicators are slow to make
NCCL_FAMILIES = {
    "all to all": (all_to_all_single, uneven_all_to_all, all_to_all),
    "reductions": (
        *(all_reduce, late_wait, two_in_flight, waited_twice, reduce),
        *(reduce_scatter, reduce_scatter_tensor, by_future, never_waited),
    ),
    "gathers": (all_gather, all_gather_into_tensor, broadcast, gather_scatter, barrier),
    "objects": (all_gather_object, broadcast_object_list, gather_object),
    "coalesced": (coalesced_all_reduce, coalesced_async),
    "functional": (
        *(functional_all_reduce, functional_late, functional_gather, functional_all_to_all),
        *(functional_coalesced, functional_no_grad, functional_inference),
    ),
    "point to point": (send_recv, one_sided),
    "batched point to point": (batch_isend_irecv,),
    "region": (region,),
}
NOT_OVER_NCCL = {
    monitored_barrier: "gloo alone has it",
    isend_irecv: "both ranks send before they receive, on one stream: serial waits for ever if a send is long",
    region_with_tensor: "its body reads the tensor on the host",
}
# how NCCL runs what gloo runs otherwise
NCCL_OTHERWISE = {
    reduce_scatter: WOVEN,  # one operation
    batch_isend_irecv: NO_STREAMS,  # a block of coalesced operations
    by_future: {**WOVEN, "auto": "any"},  # with two streams there may be something to gain all the same
}
