"""DualPipeV of torch.distributed.pipelining, left alone and woven: the same losses and gradients, to the bit.

    torchrun --nproc-per-node 2 examples/torch_dualpipev.py               one rank a pipeline, two share the experts
    torchrun --nproc-per-node 4 examples/torch_dualpipev.py --pp 2        two ranks a pipeline, two share the experts
    torchrun --nproc-per-node 8 examples/torch_dualpipev.py --pp 4 --hidden 4096 --tokens 4096

A pair of DualPipeV, a forward of one stage and a backward of the other, is one line of the schedule; `weave_schedule`
is all that it takes to run the two at once. What can be hidden is the all-to-alls inside the stages.
"""

import argparse
import logging
import os
from statistics import median

import torch
import torch.distributed as dist
from moe_chunk import make_chunk
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV

import torchweave as tw
from torchweave.adapters.torch_pipelining import weave_schedule


def start(pp: int) -> tuple[torch.device, dist.DeviceMesh]:
    """Join the ranks that torchrun started; those that share experts are neighbours."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    ranks = dist.get_world_size()
    if ranks % pp:
        raise SystemExit(f"{ranks} ranks do not divide into pipelines of {pp}: choose another --pp")
    return device, dist.init_device_mesh(device.type, (pp, ranks // pp), mesh_dim_names=("pp", "ep"))


def make_schedule(args, device, mesh) -> tuple[ScheduleDualPipeV, list[torch.nn.Parameter]]:
    """Return a schedule over this rank's two stages, always with the same weights, and these weights."""
    torch.manual_seed(dist.get_rank())
    rank, num_stages = mesh.get_local_rank("pp"), 2 * args.pp
    stages = [
        PipelineStage(
            make_chunk(args.layers, args.hidden, group=mesh.get_group("ep")).to(device),
            index,
            num_stages,
            device,
            group=mesh.get_group("pp"),
        )
        for index in (rank, num_stages - 1 - rank)  # the V: down the ranks, and up again
    ]
    schedule = ScheduleDualPipeV(stages, args.microbatches, loss_fn=torch.nn.functional.mse_loss)
    return schedule, [parameter for stage in stages for parameter in stage.submod.parameters()]


def train(schedule, parameters, args, device, mesh):
    """Run all steps; return their times in ms, and the losses and gradients."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("ep"))
    size = (args.microbatches * args.tokens, args.hidden)
    times, results = [], []
    for _ in range(args.steps):
        x, target = (torch.randn(size, generator=generator).to(device) for _ in range(2))
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        is_first = mesh.get_local_rank("pp") == 0  # with a V it has the last stage, too
        with tw.timed() as t:
            schedule.step(*((x,) if is_first else ()), target=target if is_first else None, losses=losses)
        times.append(t.device_ms)
        results += [loss.detach() for loss in losses] + [p.grad.clone() for p in parameters]
        optimizer.step()
    return times, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=1, help="ranks of a pipeline; the others share experts")
    parser.add_argument("--microbatches", type=int, default=8, help="at least twice --pp")
    parser.add_argument("--layers", type=int, default=2, help="of each stage")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="of a microbatch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--strategy", default="auto", choices=["auto", "serial", "turns", "streams"])
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as above: it takes two ranks or more")
    if args.microbatches < 2 * args.pp:
        parser.error(f"--microbatches {args.microbatches} is less than the number of stages, {2 * args.pp}")
    device, mesh = start(args.pp)
    if dist.get_rank() == 0:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        logging.getLogger("torch").setLevel(logging.WARNING)

    alone, parameters = make_schedule(args, device, mesh)
    times_alone, expected = train(alone, parameters, args, device, mesh)
    woven, parameters = make_schedule(args, device, mesh)
    weave_schedule(woven, strategy=args.strategy)
    times_woven, found = train(woven, parameters, args, device, mesh)

    difference = torch.stack([(a - b).abs().max() for a, b in zip(expected, found, strict=True)]).max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        pairs = sum("OVERLAP_F_B" in str(action) for action in woven.pipeline_order[0])
        print(f"{pairs} pairs a step on rank 0")
        # the first step learns shapes, and records the first pair of each kind
        print(f"alone: {median(times_alone[1:]):.3f} ms a step, {args.strategy}: {median(times_woven[1:]):.3f} ms")
        print(f"largest difference of losses and gradients from the schedule alone: {difference.item():g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
