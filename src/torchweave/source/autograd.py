"""IDEA: what `backward` does under a stream."""

from __future__ import annotations

from torchweave.source import streams
from torchweave.source.facts import (
    Backward,
    UnwaitedGradient,
)
from torchweave.source.run import Call, Run
from torchweave.source.values import (
    Const,
    Items,
    Stream,
    Tensor,
    Value,
    device_of,
    tensors_in,
)


def of_backward(run: Run, made: Call) -> Value:
    """`loss.backward(gradient)`, and calls of that name of anything (`accelerator.backward(loss)`)."""
    if made.receiver is not None and (isinstance(made.receiver, Tensor) or not made.args):
        return backward(run, made, made.receiver, made.given(0, "gradient"))
    gradient = made.given(1, "gradient") or made.given(1, "grad_tensors")
    return backward(run, made, made.given(0, "loss"), gradient)


def tensor_backward(run: Run, receiver: Value, made: Call) -> Value:
    """Run `tensor.backward(gradient)`."""
    if "stream" in made.keywords:
        streams.refuse_stream_keyword(run, "Tensor.backward", made)
    return backward(run, made, receiver, made.given(0, "gradient"))


def backward(run: Run, made: Call, loss: Value | None, gradient: Value | None) -> Value:
    """Run backward of a loss, or of outputs with their gradients."""
    stream, place = run.state.current, run.place(made.node)
    side = stream is not None and not stream.ambient
    text = (loss.text if loss else "") or "loss"
    if side and stream is not None and not (run.functions and run.functions[-1] == "backward"):
        losses = list(tensors_in(loss))
        streams = {one.loss_of for one in losses}
        known = next(iter(streams)) if len(streams) == 1 else None
        if not losses:
            if not isinstance(loss, (Items, Const)) or isinstance(loss, Items):
                run.note(Backward(place, stream.text, made.name, text, None))
        elif known is not None and known is not stream:
            run.note(Backward(place, stream.text, made.name, text, known.text))
        elif known is None and len(streams) == 1:
            run.note(Backward(place, stream.text, made.name, text, None))
        _gradient(run, made, stream, gradient)
    launch = run.launch(made.node, [], "cuda" if device_of(loss) == "cuda" else "", what="backward")
    if device_of(loss) == "cpu" and launch is not None:
        run.state.pending.pop(launch, None)
    return Value()


def _gradient(run: Run, made: Call, stream: Stream, gradient: Value | None) -> None:
    """Tell of gradients from outside that the stream did not wait for."""
    if gradient is None or isinstance(gradient, Const):
        return
    tensors = list(tensors_in(gradient))
    place = run.place(made.node)
    if tensors:
        unseen = [one for one in tensors if not run.state.visible(run.state.last_write(one.storage), stream)]
        if unseen:
            unseen[0].storage.told = True
            run.note(UnwaitedGradient(place, stream.text, gradient.text or unseen[0].text or "gradient", sure=True))
    elif type(gradient) is Value and not run.state.seen.get(stream) and run.state.host.get(None, 0) <= run.began:
        run.note(UnwaitedGradient(place, stream.text, gradient.text or "gradient", sure=False))
