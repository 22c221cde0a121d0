"""State of the process is saved and put back exactly; state of a thread is the same on the worker."""

from __future__ import annotations

import contextlib
import contextvars
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from torchweave.engine.state import SETTINGS, Inherited, Shared

OTHER = {
    "default dtype": torch.float64,
    "float32 precision": ("high", ()),
    "deterministic algorithms": (True, True),
    "anomaly mode": (True, False),
}


@pytest.fixture(autouse=True)
def process_stays():
    """Whatever a test does, the next begins as this one did."""
    before = Shared.capture()
    yield
    before.restore()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", range(len(SETTINGS)), ids=[setting[0] for setting in SETTINGS])
def test_each_setting_is_seen_named_and_put_back(index):
    """Catches a setting that is read by one function and written by another that does not fit."""
    name, get, put = SETTINGS[index]
    before, value = Shared.capture(), get()
    other = OTHER.get(name, not value if isinstance(value, bool) else None)
    if name == "warning filters":
        other = type(value)(list(value.value))  # an equal list, as `warnings.catch_warnings` puts in
    put(other)
    assert get() == other
    changed = Shared.capture()
    assert before.changes(changed) == (name,)
    before.restore()
    assert get() == value
    assert before.changes(Shared.capture()) == ()


PRECISIONS = {
    "of one operation": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "of one operation, after the one for all": lambda: (
        torch.set_float32_matmul_precision("high"),
        setattr(torch.backends.cuda.matmul, "allow_tf32", False),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", PRECISIONS)
def test_a_precision_that_torch_does_not_name_is_kept(how):
    """Catches a capture that fails where a program sets the precision of single operations, as torch advises."""
    told = run_fresh(
        "import torch, warnings",
        "warnings.simplefilter('ignore')",
        "from torchweave.engine.state import Shared",
        "from test_state import PRECISIONS",
        f"PRECISIONS[{how!r}]()",
        "before = Shared.capture()",
        "torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = 'ieee'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "changed = Shared.capture(before)",
        "assert changed.settings != before.settings",
        "before.restore(changed)",
        "assert before.changes(Shared.capture(before)) == () == before.changes(Shared.capture())",
        "print('kept')",
    )
    assert told == "kept"


def run_fresh(*lines):
    """Run lines in a process of their own: precision has no way back to where a process begins."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_from_a_known_state_only_what_differs_is_put_back():
    """Catches a setting, or random numbers, that stay the other strand's where nothing is asked again."""
    before, first = Shared.capture(), torch.rand(1)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with_other = Shared.capture()
    before.restore(with_other)
    assert before.changes(Shared.capture()) == ()
    assert torch.equal(torch.rand(1), first)
    with_other.restore(before)
    assert with_other.changes(Shared.capture()) == ()


def test_random_state_is_put_back_to_the_bit():
    """Catches a state that is kept by reference, and moves on with the generator."""
    before = Shared.capture()
    first = torch.rand(100)
    assert before.changes(Shared.capture()) == ("random state of the CPU",)
    before.restore()
    assert torch.equal(torch.rand(100), first)
    before.restore()
    assert torch.equal(torch.rand(100), first)


def test_cached_normal_numbers_are_part_of_the_random_state():
    """Catches a state without the second of a pair of normal numbers."""
    torch.randn(1)
    before = Shared.capture()
    first = torch.randn(5)
    before.restore()
    assert torch.equal(torch.randn(5), first)


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def thread_state():
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "functions": [id(mode) for mode in _get_current_function_mode_stack()],
        "dispatches": [id(mode) for mode in _get_current_dispatch_mode_stack()],
        "hooks": hooks,
        "forbidden": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "threads": torch.get_num_threads(),
        "context": COLOUR.get(),
    }


COLOUR = contextvars.ContextVar("colour", default="none")
CONTEXTS = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast float16 without cache": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "function mode": _FunctionMode,
    "dispatch mode": _DispatchMode,
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "hooks forbidden": lambda: torch.autograd.graph.disable_saved_tensors_hooks("no"),
}


def run_on_worker(inherited, work):
    told, errors = [], []

    def main():
        try:
            inherited.run(lambda: told.append(work()))
            told.append(thread_state())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
    assert not errors, errors
    return told


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_worker_has_what_the_caller_has(name):
    """Catches state of a thread that the backward's worker begins without."""
    token = COLOUR.set(name)
    with CONTEXTS[name]():
        expected, inherited = thread_state(), Inherited()
    COLOUR.reset(token)
    found, afterwards = run_on_worker(inherited, thread_state)
    assert found == expected
    assert afterwards["functions"] == afterwards["dispatches"] == []
    assert afterwards["hooks"] is None


def test_several_nested_contexts_keep_their_order():
    """Catches modes that are pushed the other way round."""
    with _FunctionMode(), _FunctionMode(), _DispatchMode(), _DispatchMode(), torch.no_grad(), CONTEXTS["autocast"]():
        expected, inherited = thread_state(), Inherited()
    found, _ = run_on_worker(inherited, thread_state)
    assert found == expected


def test_nested_saved_tensor_hooks():
    """Catches all hooks but the innermost being lost: popping it on the worker must bring the outer one back."""
    calls = []

    def hooks(name):
        return torch.autograd.graph.saved_tensors_hooks(lambda x: calls.append(name) or x, lambda x: x)

    def work():
        x = torch.ones(2, requires_grad=True)
        x.exp()
        return len(calls)

    with hooks("outer"), hooks("inner"):
        inherited = Inherited()
        work()
    expected = list(calls)
    calls.clear()
    run_on_worker(inherited, work)
    assert calls == expected


def test_the_cast_cache_of_the_caller_survives_the_worker():
    """Catches a worker whose autocast exit throws away the casts that the other strand is using."""
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(2, 4)

    def region():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.nn.functional.linear(x, weight).sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = torch.nn.functional.linear(x, weight)
        inherited = Inherited()
        run_on_worker(inherited, region)
        second = torch.nn.functional.linear(x, weight)
    # one cast, made once: both products hang on the very same node
    assert first.grad_fn.next_functions[1][0] is second.grad_fn.next_functions[1][0] or (
        cast_nodes(first) == cast_nodes(second)
    )


def cast_nodes(tensor):
    found, pending = set(), [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is None:
            continue
        if "ToCopy" in node.name():
            found.add(node)
        pending.extend(following for following, _ in node.next_functions)
    return found


def test_capture_leaves_nothing_changed():
    """Catches a capture that counts nesting up, or takes modes off the caller's stack."""
    with _FunctionMode(), _DispatchMode(), CONTEXTS["autocast"]():
        before = thread_state()
        Inherited()
        Shared.capture()
        assert thread_state() == before
        nesting = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        assert nesting == 2


def test_a_worker_touches_no_device_that_the_process_does_not_use(monkeypatch):
    """Catches ranks of one machine that each make a context, and lose memory, on the other ranks' devices."""
    touched = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device == 1, raising=False)
    monkeypatch.setattr(torch.cuda, "set_stream", touched.append)
    monkeypatch.setattr(torch.cuda, "set_device", touched.append)
    run_on_worker(Inherited(), lambda: None)
    assert touched == ["a stream of 1", 1]
