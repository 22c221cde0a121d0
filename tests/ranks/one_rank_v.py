"""A stand-in for DualPipeV's runner on one rank, for tests: its hook, its order and its promises, on any device.

DeepSeek's own is in its source and in no package; this one is written from what its README and its hook's example say.
"""

from __future__ import annotations

import torch


class OneRankV:
    """Two chunks of one rank, the second behind the first; forwards and backwards in pairs, as in its main step.

    Args:
        modules: Both chunks, of one class; the hook is looked for on that class.
    """

    def __init__(self, modules):
        self.modules = modules
        self.hook = getattr(type(modules[0]), "overlapped_forward_backward", None)
        if type(modules[0]) is not type(modules[1]):
            self.hook = None

    def step(self, x, *, num_chunks, criterion, labels):
        """Return the losses of all microbatches and the outputs; the gradients are in the modules."""
        self.criterion, self.losses, self.results = criterion, [], []
        self.inputs = [[(part,) for part in x.tensor_split(num_chunks)], []]
        self.outputs, self.output_grads = [[], []], [[], []]
        self.labels = [(part,) for part in labels.tensor_split(num_chunks)]
        self._forward(0, 0)
        self._forward(1, 0)
        for number in range(1, num_chunks):
            if number == 1:  # the first two are not paired: it shortens the bubble
                self._forward(0, number)
                self._backward(1, number - 1)
            else:
                self._pair(0, number, 1, number - 1)
            self._pair(1, number, 0, number - 1)
        self._backward(1, num_chunks - 1)
        self._backward(0, num_chunks - 1)
        return torch.stack(self.losses), torch.cat(self.results)

    def _forward(self, phase, number):
        output = self.modules[phase](*self.inputs[phase][number])
        loss = self.criterion(output, *self.labels[number]) if phase == 1 else None
        self._keep_forward(phase, [output], loss)

    def _backward(self, phase, number):
        if phase == 1:
            self.losses[number].backward()
            self.losses[number].detach_()
        else:
            torch.autograd.backward(self.outputs[0][number], self.output_grads[0][number])
        self._keep_backward(phase, number)

    def _pair(self, phase0, number0, phase1, number1):
        if self.hook is None:
            self._forward(phase0, number0)
            self._backward(phase1, number1)
            return
        is_last0, is_last1 = phase0 == 1, phase1 == 1
        outputs0, loss0 = type(self.modules[phase0]).overlapped_forward_backward(
            self.modules[phase0],
            self.inputs[phase0][number0],
            self.criterion if is_last0 else None,
            self.labels[number0] if is_last0 else [],
            self.modules[phase1],
            self.losses[number1] if is_last1 else None,
            [] if is_last1 else self.outputs[0][number1],
            [] if is_last1 else self.output_grads[0][number1],
        )
        self._keep_forward(phase0, outputs0, loss0)
        self._keep_backward(phase1, number1)

    def _keep_forward(self, phase, outputs, loss):
        if phase == 1:
            self.losses.append(loss)
            self.results.append(outputs[0].detach())
            return
        self.outputs[0].append(outputs)
        self.inputs[1].append(tuple(output.detach().requires_grad_() for output in outputs))

    def _keep_backward(self, phase, number):
        if phase == 1:
            self.output_grads[0].append([part.grad for part in self.inputs[1][number]])
        self.inputs[phase][number] = None
