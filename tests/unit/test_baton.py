"""The baton that two strands hand to each other."""

import ctypes
import threading

import pytest

from torchweave.engine import baton as baton_module
from torchweave.engine.baton import Baton, may_stay_awake

LIMIT_S = 20.0


@pytest.mark.parametrize("awake", [False, True])
def test_one_thread_at_a_time_has_it(awake):
    """Catches a baton that is there twice, or lost, and a hint that is taken for the baton itself."""
    batons = [Baton(awake=awake), Baton(awake=awake)]
    holders, troubles = [], []

    def run(own, other):
        for _ in range(500):
            if not batons[own].take(LIMIT_S):
                troubles.append(own)
                return
            holders.append(own)
            batons[other].hand()

    threads = [threading.Thread(target=run, args=(own, 1 - own)) for own in (0, 1)]
    for thread in threads:
        thread.start()
    batons[0].hand()
    for thread in threads:
        thread.join(LIMIT_S)
    assert troubles == []
    assert holders == [0, 1] * 500
    assert not batons[0].is_away
    assert batons[1].is_away


@pytest.mark.parametrize("awake", [False, True])
def test_a_wait_has_a_limit(awake):
    """Catches a thread that waits awake for ever."""
    assert not Baton(awake=awake).take(0.01)


def test_who_waits_awake_leaves_the_interpreter_to_others(monkeypatch):
    """Catches a wait that keeps the other strand, which it waits for, from running Python."""
    # some seconds: who keeps the interpreter looks until the end, and finds nothing
    monkeypatch.setattr(baton_module, "_LOOKS", ctypes.c_size_t(2_000_000_000))
    baton, found, begins = Baton(awake=True), [], threading.Event()

    def look():
        begins.set()
        found.append(baton._look())

    waiter = threading.Thread(target=look)
    waiter.start()
    assert begins.wait(LIMIT_S)
    baton.hand()
    waiter.join(LIMIT_S)
    assert found == [ctypes.addressof(baton._cell)]
    assert baton.take(LIMIT_S)


def test_a_c_library_without_the_functions_only_sleeps(monkeypatch):
    """Catches an import that fails, or a wait that is none, where POSIX is not."""
    monkeypatch.setattr(baton_module.ctypes, "CDLL", lambda _: object())
    assert baton_module._find() is None
    monkeypatch.setattr(baton_module, "_FIND", None)
    baton = Baton(awake=True)
    assert not baton.take(0.01)
    baton.hand()
    assert baton.take(0.01)


@pytest.mark.parametrize(
    ("processors", "devices", "may"), [(16, 1, True), (16, 8, False), (128, 8, True), (2, 1, False)]
)
def test_processors_are_to_spare_where_there_are_several_for_each_device(monkeypatch, processors, devices, may):
    """Catches strands that wait awake on the processors that they wait for."""
    monkeypatch.setattr(baton_module.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(baton_module.torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(baton_module, "_num_processors", lambda: processors)
    assert may_stay_awake() is may
