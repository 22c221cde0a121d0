"""Other threads' frames: they are read while those threads run on."""

import gc
import subprocess
import sys
import threading

import pytest

from torchweave import frames

# Threads that wind up and down deep stacks, and a collection in nearly every look that lets them run on meanwhile.
HOSTILE = """
import gc, sys, threading, time

from torchweave import frames


def deep(depth, *rest):
    if depth:
        return deep(depth - 1, *rest)
    time.sleep(0.0001)


def work():
    turn = 0
    while True:
        turn += 1
        deep(40 + turn % 150, *range(turn % 40))


def let_others_run(phase, info):
    if threading.get_ident() == me:
        time.sleep(0.001)


me = threading.get_ident()
gc.set_threshold(10, 1000, 1000)
gc.callbacks.append(let_others_run)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
end = time.monotonic() + 3
seen = 0
while time.monotonic() < end:
    time.sleep(0.0005)
    with frames.others() as others:
        for frame in others.values():
            while frame is not None:
                frame.f_code.co_filename, frame.f_lineno
                frame = frame.f_back
                seen += 1
assert gc.isenabled()
assert seen > 0
"""


def test_a_collection_in_a_look_does_not_crash_the_process():
    """Catches what Python 3.11 did with `sys._current_frames()` alone: a segmentation fault in three runs of three."""
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_all_other_threads_and_not_this_one():
    go, stood = threading.Event(), threading.Event()

    def stand():
        stood.set()
        go.wait(10)

    thread = threading.Thread(target=stand)
    thread.start()
    stood.wait(10)
    try:
        with frames.others() as others:
            assert threading.get_ident() not in others
            assert thread.ident in others
            # nothing lives on because it was looked at
            others.clear()
    finally:
        go.set()
        thread.join()


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_left_as_it_was(collects):
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(KeyError), frames.others():
            raise KeyError
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
