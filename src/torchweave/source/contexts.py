"""IDEA: with statements: stream contexts, and this file's context managers."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from torchweave.source.expressions import text_of
from torchweave.source.functions import Functions, Signal
from torchweave.source.run import WAITING, Call
from torchweave.source.values import (
    Choice,
    Const,
    Dotted,
    Function,
    Instance,
    Stream,
    StreamContext,
    Value,
)


class Contexts(Functions):
    """Reads with statements."""

    def _with(self, node: ast.With | ast.AsyncWith) -> Signal:
        return self._within(list(node.items), node.body)

    def _within(self, items: list[ast.withitem], body: Sequence[ast.stmt]) -> Signal:
        if not items:
            return self.block(body)
        first, rest = items[0], items[1:]
        generator = self._generator(first.context_expr)
        if generator is not None:
            return self._within_generator(generator, first, rest, body)
        value = self.value(first.context_expr)
        context = self._context(value)
        current, default = self.state.current, self.default_device
        if isinstance(context, StreamContext):
            self._enter(context)
        elif _has_device(value, first.context_expr):
            self.default_device = str(value.value) if isinstance(value, Const) else ""
        elif isinstance(value, Dotted) or "graph" in text_of(first.context_expr):
            self.state.current = None if "graph" in text_of(first.context_expr) else current
        entered = self._call_method(value, "__enter__", first.context_expr)
        if first.optional_vars is not None:
            self.assign(first.optional_vars, entered if entered is not None else value)
        signal = self._within(rest, body)
        self._call_method(value, "__exit__", first.context_expr)
        if type(value) is Value and any(word in text_of(first.context_expr).lower() for word in (*WAITING, "timer")):
            self.maybe_waits("wait")
        self.state.current, self.default_device = current, default
        return signal

    def _context(self, value: Value) -> Value:
        """Return the stream context that a value is: itself, or a stream that is entered."""
        if isinstance(value, Stream):
            return StreamContext(inner=value)
        if isinstance(value, Choice) and any(isinstance(one, (Stream, StreamContext)) for one in value.options):
            return StreamContext(inner=None)  # one of several: not known
        return value

    def _enter(self, context: StreamContext) -> None:
        self.state.current = context.inner
        if context.inner is not None and not context.inner.ambient:
            self.uses_streams()

    def _call_method(self, value: Value, name: str, node: ast.expr) -> Value | None:
        if isinstance(value, Instance) and value.cls is not None:
            method = self.method_of(value.cls, name)
            if method is not None:
                made = ast.copy_location(ast.Call(func=node, args=[], keywords=[]), node)
                bound = Function(name, node=method.node, frame=method.frame, owner=value)
                return self.inline(bound, Call(made, name, None, [], {}, starred=False))
        return None

    def _generator(self, node: ast.expr) -> tuple[Function, Call] | None:
        """Return the function of this file behind a `contextlib.contextmanager`, with its call."""
        if not isinstance(node, ast.Call):
            return None
        function = self.value(node.func)
        if not isinstance(function, Function) or not isinstance(function.node, ast.FunctionDef):
            return None
        if not any(text_of(one).endswith("contextmanager") for one in function.node.decorator_list):
            return None
        args = [self.value(one) for one in node.args]
        keywords = {one.arg or "**": self.value(one.value) for one in node.keywords}
        return function, Call(node, function.text, None, args, keywords, starred="**" in keywords)

    def _within_generator(
        self,
        generator: tuple[Function, Call],
        item: ast.withitem,
        rest: list[ast.withitem],
        body: Sequence[ast.stmt],
    ) -> Signal:
        signals: list[Signal] = []
        frame, outer = self.frame, self.activations[-1]

        def run_body(value: Value) -> None:
            inner_frame, inner_names = self.frame, self.state.names
            inner, self.activations[-1] = self.activations[-1], outer
            self.frame, self.state.names = frame, frame.names
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value)
            signals.append(self._within(rest, body))
            self.activations[-1] = inner
            frame.names = self.state.names
            self.frame, self.state.names = inner_frame, inner_names

        self._read_function(*generator, at_yield=run_body)
        return signals[0] if signals else self._within(rest, body)


def _has_device(value: Value, node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and text_of(node.func).endswith("device") and "cuda" not in text_of(node.func)
