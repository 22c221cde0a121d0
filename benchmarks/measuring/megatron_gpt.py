"""A GPT of megatron-core in two chunks of one pipeline rank, trained for some steps through the question's hook.

A "DualPipe on top of Megatron" as the question has it: the pairs of the V's main step, `forward_step_func` as
Megatron's own training loop has it, `set_input_tensor` on the models.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist

TINY = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "add_bias_linear": False,
}  # fmt: skip


class Text(NamedTuple):
    """The sizes of a step's text: `batch` sequences of `length` in each microbatch."""

    vocabulary: int = 32
    batch: int = 2
    length: int = 8
    microbatches: int = 3


def without_transformer_engine(patch):
    """Give megatron-core the name that it looks up and that only Transformer Engine's import defines (0.16.1)."""
    from megatron.core.transformer.moe import moe_utils

    patch.setattr(moe_utils, "te_general_gemm", None, raising=False)


def on_cpu(patch):
    """Let megatron-core run without CUDA: random state, current device, and its copies to the host.

    Where it keeps CUDA's random state it gets the CPU's; where its dispatcher copies the sizes of its all-to-alls to
    the host on a stream of its own, they are there already.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def on_host(self, _point, tokens_per_expert=None):
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if isinstance(value := getattr(self, name), torch.Tensor):
                setattr(self, name, value.tolist())
        return tokens_per_expert

    patch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state())
    patch.setattr(torch.cuda, "manual_seed", torch.manual_seed)
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    patch.setattr(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    patch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", "the host's")
    patch.setattr(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", on_host)


def plain_pair(module0, inputs0, labels0, masks0, loss1, outputs1, grads1, step, is_last_stage0):
    """The question's function without weave: backward, then forward."""
    if loss1 is not None:
        loss1.backward()
        loss1.detach_()
    elif outputs1:
        torch.autograd.backward(outputs1, grads1)
    if len(inputs0) == 1:
        getattr(module0, "module", module0).set_input_tensor(inputs0)
    outputs, loss_func = step([*inputs0, labels0, masks0] if is_last_stage0 else inputs0, module0)
    return [outputs], loss_func(outputs)[0] if is_last_stage0 else None


def forward_step(text, device):
    """Return what Megatron calls `forward_step_func`: it knows the data, and no model but the one that it is given."""
    positions = torch.arange(text.length, device=device).expand(text.batch, text.length)
    mask = torch.ones(1, 1, text.length, text.length, dtype=torch.bool, device=device).triu(1)

    def forward_step_func(inputs, module):
        if getattr(module, "module", module).pre_process:
            return module(inputs[0], positions, mask), None
        _, labels, loss_mask = inputs
        losses = module(None, positions, mask, labels=labels)
        return losses, lambda losses: ((losses * loss_mask).mean(), {"lm loss": losses.detach()})

    return forward_step_func


@contextlib.contextmanager
def groups_of_ranks(tensor, expert):
    """Make Megatron's groups, some thirty that belong to the process, for all models inside.

    Args:
        tensor: Ranks that share each layer.
        expert: Ranks that share the experts.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Apex and Transformer Engine, which are not there
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, expert_model_parallel_size=expert)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


class Gpt:
    """The first half of a GPT with the embedding, and the second half with the head; within `groups_of_ranks`.

    Args:
        tensor: Ranks that share each layer.
        expert: Ranks that share the experts; a mixture of experts is in the layers where it is not 1.
        device: Where it is trained.
        wrapped: Whether Megatron's own DistributedDataParallel is around each half.
        text: What it is trained on.
        more: Other options of Megatron's TransformerConfig; sizes beside those of a tiny model among them.
    """

    def __init__(self, tensor, expert, device, *, wrapped=False, text=Text(), **more):  # noqa: B008
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Apex and Transformer Engine, which are not there
            from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
            from megatron.core.models.gpt import GPTModel
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
            from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
            from megatron.core.transformer.transformer_config import TransformerConfig

            get_cuda_rng_tracker().reset()
            torch.manual_seed(1)
            model_parallel_cuda_manual_seed(123)
            config = TransformerConfig(
                attention_dropout=0.0, hidden_dropout=0.1,
                tensor_model_parallel_size=tensor, expert_model_parallel_size=expert, pipeline_dtype=torch.float32,
                use_cpu_initialization=True, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
                bias_dropout_fusion=False, bias_activation_fusion=False,
                **{**TINY, **(EXPERTS if expert > 1 else {}), **more},
            )  # fmt: skip
            self.chunks = [
                GPTModel(
                    config, get_gpt_layer_local_spec(num_experts=config.num_moe_experts), vocab_size=text.vocabulary,
                    max_sequence_length=text.length, parallel_output=True,
                    pre_process=is_first, post_process=not is_first,
                    share_embeddings_and_output_weights=False,
                ).to(device)
                for is_first in (True, False)
            ]  # fmt: skip
            if wrapped:
                data_parallel = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=500)
                self.chunks = [DistributedDataParallel(config, data_parallel, chunk) for chunk in self.chunks]
        self.text = text
        self.wrappers, self.forward_step = self.chunks if wrapped else [], forward_step(text, device)
        # ranks that share a layer see the same text, all others see their own
        self.seed, self.device = dist.get_rank() // tensor, device
        self.optimizer = torch.optim.SGD([p for chunk in self.chunks for p in chunk.parameters()], lr=0.1)

    def step(self, pair):
        """Train one step, on the same text each time; return its losses and all gradients."""
        losses = self.run(pair)
        parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        told = [[loss.item() for loss in losses], [parameter.grad.clone() for parameter in parameters]]
        self.optimizer.step()
        return told

    def run(self, pair):
        """Run forward and backward of a step, whose gradients replace those before; return its losses."""
        generator = torch.Generator().manual_seed(self.seed)
        text = self.text
        size = (text.microbatches, text.batch, text.length)
        tokens = torch.randint(0, text.vocabulary, size, generator=generator).to(self.device)
        loss_mask = torch.ones(text.batch, text.length, device=self.device)
        self.optimizer.zero_grad()
        with contextlib.ExitStack() as stack:
            for wrapper in self.wrappers:
                wrapper.zero_grad_buffer()
                stack.enter_context(wrapper.no_sync())
            losses = self._microbatches(pair, tokens, loss_mask)
        for wrapper in self.wrappers:
            wrapper.start_grad_sync()
            wrapper.finish_grad_sync()
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                parameter.grad = getattr(parameter, "main_grad", parameter.grad)
        return losses

    def _microbatches(self, pair, tokens, loss_mask):
        first, second = self.chunks
        losses, loss, output, leaf = [], None, None, None
        for part in tokens:
            # the forward of the first chunk with the backward of the second, and the other way round
            (new_output,), _ = pair(first, [part], None, None, loss, [], [], self.forward_step, False)
            new_leaf = new_output.detach().requires_grad_()
            waiting = ([output], [leaf.grad]) if leaf is not None else ([], [])
            _, loss = pair(second, [new_leaf], part, loss_mask, None, *waiting, self.forward_step, True)
            output, leaf = new_output, new_leaf
            losses.append(loss)
        loss.backward()
        loss.detach_()
        torch.autograd.backward([output], [leaf.grad])
        return losses
