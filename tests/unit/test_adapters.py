"""Both hooks against the serial reference: outputs, loss and every gradient are bit-equal; bad input is named."""

import copy
import sys
import threading
import types

import pytest
import torch
from torch import nn

from torchweave.adapters import deepseek, megatron
from torchweave.adapters.deepseek import HOOK_NAMES, overlapped
from torchweave.errors import UsageError


def stand_in_weave(forward, backward, *, strategy="auto"):
    """Backward on a worker thread, then forward: the contract of `weave` without its turns."""
    failed = []

    def work():
        try:
            backward()
        except Exception as error:
            failed.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    result = forward()
    if failed:
        raise failed[0]
    return result


@pytest.fixture(params=["stand-in", "engine"], autouse=True)
def strategies(request, monkeypatch):
    """Run every test with a stand-in and with the engine; gives the strategies that were asked for."""
    if request.param == "engine":
        from torchweave.engine.pair import weave
    else:
        weave = stand_in_weave
    asked = []

    def recording(forward, backward, *, strategy="auto"):
        asked.append(strategy)
        return weave(forward, backward, strategy=strategy)

    pair = types.ModuleType("torchweave.engine.pair")
    pair.weave = recording
    monkeypatch.setitem(sys.modules, "torchweave.engine.pair", pair)
    return asked


class Chunk(nn.Module):
    """One or two outputs, the second without a graph: what a stage that passes a mask on returns."""

    def __init__(self, seed, with_mask=False):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.with_mask = with_mask
        self.received = None

    def set_input_tensor(self, tensors):
        self.received = tensors

    def forward(self, x, mask=None):
        out = self.down(torch.tanh(self.up(x)))
        return (out, mask) if self.with_mask else out


def tensor(seed, requires_grad=False):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_(requires_grad)


def criterion(output, target):
    return (output - target).square().mean().clone()


def assert_same(given, wanted):
    torch.testing.assert_close(given, wanted, rtol=0, atol=0)


def grads_of(*modules):
    return [None if p.grad is None else p.grad.clone() for m in modules for p in m.parameters()]


class Case:
    """One pair: the chunk that goes forward, and one that has gone forward and is about to go backward."""

    def __init__(self, *, last1=False):
        self.module0, self.module1 = Chunk(0), Chunk(1)
        self.x0, self.x1 = tensor(2, requires_grad=True), tensor(3, requires_grad=True)
        self.labels0, self.grad1 = tensor(4), tensor(5)
        outputs1 = self.module1(self.x1)
        self.loss1 = criterion(outputs1, tensor(6)) if last1 else None
        self.outputs1, self.grads1 = ([], []) if last1 else ([outputs1], [self.grad1])

    def backward(self):
        if self.loss1 is not None:
            self.loss1.backward()
        else:
            torch.autograd.backward(self.outputs1, self.grads1)

    def serial(self, with_loss):
        """The reference: backward, forward, and then backward of the forward's own result."""
        self.backward()
        output = self.module0(self.x0)
        loss = criterion(output, self.labels0) if with_loss else None
        return self.finish([output], loss)

    def deepseek(self, with_loss):
        outputs0, loss0 = deepseek.overlapped_forward_backward(
            self.module0, (self.x0,), criterion if with_loss else None, (self.labels0,) if with_loss else [],
            self.module1, self.loss1, self.outputs1, self.grads1,
        )  # fmt: skip
        return self.finish(outputs0, loss0)

    def megatron(self, with_loss):
        def step(inputs, module):
            assert module is self.module0
            x, *rest = inputs
            assert [id(r) for r in rest] == ([id(self.labels0), id(None)] if with_loss else [])
            assert module.received[0] is x
            return module(x), lambda out: (criterion(out, self.labels0), {"a": "report"})

        outputs0, loss0 = megatron.overlapped_forward_backward(
            self.module0, [self.x0], self.labels0, None, self.loss1, self.outputs1, self.grads1, step, with_loss
        )
        return self.finish(outputs0, loss0)

    def finish(self, outputs0, loss0):
        assert isinstance(outputs0, list)
        if self.loss1 is not None:
            self.last_loss_has_graph = self.loss1.grad_fn is not None
        before = [self.x1.grad.clone(), *grads_of(self.module1)]
        (outputs0[0].square().sum() if loss0 is None else loss0).backward()
        return [*outputs0, loss0, *before, self.x0.grad, *grads_of(self.module0)]


@pytest.mark.parametrize("form", ["deepseek", "megatron"])
@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("last1", [False, True])
def test_bit_equal_to_backward_and_then_forward(form, with_loss, last1):
    case = Case(last1=last1)
    assert_same(getattr(case, form)(with_loss), Case(last1=last1).serial(with_loss))
    if last1:
        assert not case.last_loss_has_graph, "loss1.detach_() is part of the contract"


def run_deepseek(case, outputs1, grads1):
    return deepseek.overlapped_forward_backward(
        case.module0, [case.x0], None, None, case.module1, None, outputs1, grads1
    )


def run_megatron(case, outputs1, grads1):
    return megatron.overlapped_forward_backward(
        case.module0, [case.x0], None, None, None, outputs1, grads1, lambda xs, m: (m(*xs), None), False
    )


FORMS = pytest.mark.parametrize("run", [run_deepseek, run_megatron])


@FORMS
def test_none_gradients_and_outputs_without_a_graph_are_left_out(run):
    case, wanted = Case(), Case()
    wanted.backward()
    outputs1 = [None, *case.outputs1, tensor(7), case.module0(case.x0)]
    run(case, outputs1, (None, case.grad1, tensor(8), None))
    assert_same([case.x1.grad, *grads_of(case.module1)], [wanted.x1.grad, *grads_of(wanted.module1)])
    assert case.x0.grad is None


@FORMS
def test_several_outputs_run_backward_at_once_through_a_shared_graph(run):
    # two calls of backward would fail: the first frees the part of the graph that both outputs share
    case, wanted = Case(), Case()
    shared = case.outputs1[0] * 2
    run(case, [shared.sin(), shared.cos()], [tensor(9), tensor(10)])
    other = wanted.outputs1[0] * 2
    torch.autograd.backward([other.sin(), other.cos()], [tensor(9), tensor(10)])
    assert_same([case.x1.grad, *grads_of(case.module1)], [wanted.x1.grad, *grads_of(wanted.module1)])


@FORMS
def test_outputs_that_the_pipeline_has_freed_still_run_backward(run):
    case, wanted = Case(), Case()
    wanted.backward()
    case.outputs1[0].data = torch.empty(0)
    with pytest.raises(RuntimeError, match="shape"):
        torch.autograd.backward(case.outputs1, case.grads1)
    run(case, case.outputs1, case.grads1)
    assert_same([case.x1.grad, *grads_of(case.module1)], [wanted.x1.grad, *grads_of(wanted.module1)])


@FORMS
def test_nothing_to_run_backward_is_a_plain_forward(run, strategies):
    # as a pair, the first of its kind, it would be a record without a backward's crossings
    case = Case()
    outputs0, loss0 = run(case, [], [])
    assert strategies == []
    assert_same(outputs0, [case.module0(case.x0)])
    assert loss0 is None
    assert case.x1.grad is None


@FORMS
def test_outputs_of_a_chunk_with_several(run):
    case = Case()
    case.module0.with_mask = True
    outputs0, _ = run(case, case.outputs1, case.grads1)
    assert len(outputs0) == 2
    assert outputs0[1] is None
    # DeepSeek's form promises a list; the question's form hands on what the step returned
    assert isinstance(outputs0, list if run is run_deepseek else tuple)


@FORMS
def test_an_exception_of_the_forward_keeps_its_type_and_backward_has_run(run):
    case = Case()
    case.module0.up = nn.Linear(3, 16)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(case, case.outputs1, case.grads1)
    assert case.x1.grad is not None


@FORMS
@pytest.mark.parametrize(
    ("outputs1", "grads1", "rule"),
    [
        (torch.ones(1), [None], "`outputs1` is a list or tuple"),
        ([torch.ones(1)], None, "`output_grads1` is a list or tuple"),
        ([torch.ones(1)], [], "equally long"),
        (["text"], [None], r"`outputs1\[0\]` is a tensor or None"),
        ([torch.ones(1)], [3], r"`output_grads1\[0\]` is a tensor or None"),
        ([None], [torch.ones(1)], "A gradient belongs to an output"),
    ],
)
def test_a_bad_backward_side_is_refused_before_anything_runs(run, outputs1, grads1, rule, strategies):
    case = Case()
    with pytest.raises(UsageError, match=rule) as caught:
        run(case, outputs1, grads1)
    assert caught.value.given
    assert caught.value.remedy
    assert strategies == []


def call_deepseek(**changed):
    case = Case()
    arguments = {
        "module0": case.module0, "inputs0": [case.x0], "criterion0": criterion, "labels0": [case.labels0],
        "module1": case.module1, "loss1": None, "outputs1": case.outputs1, "output_grads1": case.grads1,
    }  # fmt: skip
    return deepseek.overlapped_forward_backward(**{**arguments, **changed})


def call_megatron(**changed):
    case = Case()
    arguments = {
        "module0": case.module0, "inputs0": [case.x0], "labels0": None, "loss_masks0": None, "loss1": None,
        "outputs1": case.outputs1, "output_grads1": case.grads1, "is_last_stage0": True,
        "forward_step_func": lambda xs, m: (m(xs[0]), lambda out: (out.sum(), {})),
    }  # fmt: skip
    return megatron.overlapped_forward_backward(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("call", "changed", "rule"),
    [
        (call_deepseek, {"module0": "chunk"}, "`module0` is callable"),
        (call_deepseek, {"module0": lambda x: {"out": x}}, r"`module0\(\*inputs0\)` is a tensor, or a list"),
        (call_deepseek, {"inputs0": torch.ones(2, 8)}, "`inputs0` is a list or tuple"),
        (call_deepseek, {"criterion0": "mse"}, "`criterion0` is callable"),
        (call_deepseek, {"labels0": torch.ones(4, 8)}, "`labels0` is a list or tuple"),
        (call_deepseek, {"loss1": 0.5}, "`loss1` is a tensor or None"),
        (call_megatron, {"inputs0": torch.ones(1, 8)}, "`inputs0` is a list or tuple"),
        (call_megatron, {"loss1": [torch.ones(1)]}, "`loss1` is a tensor or None"),
        (call_megatron, {"forward_step_func": None}, "`forward_step_func` is callable"),
        (call_megatron, {"forward_step_func": lambda xs, m: m(xs[0])}, "a pair of the outputs and a loss function"),
        (call_megatron, {"forward_step_func": lambda xs, m: (m(xs[0]), None)}, r"`forward_step_func\(...\)\[1\]`"),
        (call_megatron, {"module0": nn.Sequential(nn.Linear(8, 8))}, "has the method `set_input_tensor`"),
    ],
)
def test_bad_input_names_the_rule_what_was_given_and_the_remedy(call, changed, rule):
    with pytest.raises(UsageError, match=rule) as caught:
        call(**changed)
    assert caught.value.given
    assert caught.value.remedy


def test_a_bare_tensor_is_told_to_become_a_list():
    with pytest.raises(UsageError) as caught:
        call_deepseek(inputs0=torch.ones(2, 8))
    assert caught.value.given == "a tensor of shape (2, 8)"
    assert "`[inputs0]`" in caught.value.remedy


class Wrapper(nn.Module):
    """Hides its module's methods, as DistributedDataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


def test_set_input_tensor_is_found_through_wrappers_and_only_for_one_input():
    chunk = Chunk(0)
    wrapped = Wrapper(Wrapper(chunk))
    inputs = [tensor(1)]
    call_megatron(module0=wrapped, inputs0=inputs)
    assert chunk.received is inputs
    chunk.received = None
    call_megatron(module0=wrapped, inputs0=[*inputs, None])
    assert chunk.received is None
    with pytest.raises(UsageError) as caught:
        call_megatron(module0=Wrapper(nn.Linear(8, 8)))
    assert caught.value.given == "Wrapper around Linear"


def test_the_decorator_adds_the_hook_under_both_spellings_as_the_runner_calls_it(strategies):
    decorated = overlapped(type("Decorated", (Chunk,), {}))
    for name in HOOK_NAMES:
        case = Case()
        case.module0.__class__ = case.module1.__class__ = decorated
        # positional, on the type: this is the call in the DualPipe runner
        outputs0, loss0 = getattr(type(case.module0), name)(
            case.module0, (case.x0,), None, [], case.module1, None, tuple(case.outputs1), tuple(case.grads1)
        )
        assert_same(case.finish(outputs0, loss0), Case().serial(with_loss=False))
    assert strategies == ["auto", "auto"]
    assert decorated.__name__ == "Decorated"


def test_the_decorator_takes_a_strategy_and_subclasses_inherit_the_hook(strategies):
    decorated = overlapped(strategy="serial")(type("Decorated", (Chunk,), {}))
    child = type("Child", (decorated,), {})
    case = Case()
    child.overlapped_forward_backward(case.module0, [case.x0], None, [], case.module1, None, case.outputs1, case.grads1)
    assert strategies == ["serial"]
    assert overlapped(child) is child, "a subclass may choose anew"


@pytest.mark.parametrize("given", [Chunk(0), int, lambda: None])
def test_the_decorator_refuses_what_is_no_class_of_modules(given):
    with pytest.raises(UsageError, match=r"subclass of torch\.nn\.Module"):
        overlapped(given)


def test_an_unknown_strategy_is_refused_where_it_is_given():
    with pytest.raises(UsageError, match="strategy is one of") as caught:
        overlapped(strategy="fast")
    assert caught.value.given == "'fast'"


def test_the_decorator_does_not_replace_a_hook_of_the_users_own():
    own = type("Own", (Chunk,), {"overlapped_forward_backward": classmethod(lambda cls: "mine")})
    with pytest.raises(UsageError, match="one hook") as caught:
        overlapped(own)
    assert "Own defines" in caught.value.given
    assert own.overlapped_forward_backward() == "mine"


def test_chunks_survive_copying_with_the_hook():
    decorated = overlapped(type("Decorated", (Chunk,), {}))
    assert hasattr(type(copy.deepcopy(decorated(0))), "overlaped_forward_backward")
