"""IDEA: statements read in the order in which they would run: branches part and meet, loops go round twice."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from torchweave.source import clocks
from torchweave.source.branches import is_without_cuda
from torchweave.source.contexts import Contexts
from torchweave.source.expressions import text_of
from torchweave.source.facts import Loop
from torchweave.source.functions import Signal
from torchweave.source.state import State, meet
from torchweave.source.values import (
    Class,
    Dotted,
    Function,
    Tensor,
    Value,
    options,
    tensors_in,
)

_MOST_PASSES_DEPTH = 2  # loops within each other that are gone round twice


class Statements(Contexts):
    """Reads statements."""

    def block(self, statements: Sequence[ast.stmt]) -> Signal:
        """Read statements until one leaves the block."""
        for statement in statements:
            handler = _HANDLERS.get(type(statement))
            if handler is None or not self.enter():
                continue
            self.statement = statement
            signal = handler(self, statement)
            self.depth -= 1
            if signal:
                return signal
        return ""

    def _assignment(self, node: ast.Assign) -> Signal:
        value = self.value(node.value)
        for target in node.targets:
            self.assign(target, value)
        return ""

    def _annotated(self, node: ast.AnnAssign) -> Signal:
        if node.value is not None:
            self.assign(node.target, self.value(node.value))
        return ""

    def _augmented(self, node: ast.AugAssign) -> Signal:
        value, target = self.value(node.value), self.value(node.target)
        if isinstance(node.op, ast.Sub):
            clocks.subtract(self, target, value)
        known = [one for one in options(target) if isinstance(one, Tensor)]
        if known:
            self.wrote(target, self.launch(node, [target, value]))
        elif any(True for _ in tensors_in(value)):
            self.assign(node.target, self.compute(node, [value]))
        return ""

    def _delete(self, node: ast.Delete) -> Signal:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._drop(target.id, node)
                self.state.names.pop(target.id, None)
        return ""

    def _expression(self, node: ast.Expr) -> Signal:
        self.value(node.value)
        return ""

    def _import(self, node: ast.Import) -> Signal:
        for one in node.names:
            path = one.name if one.asname else one.name.partition(".")[0]
            self.state.names[one.asname or path] = Dotted(path, path=path)
        return ""

    def _import_from(self, node: ast.ImportFrom) -> Signal:
        base = "." * node.level + (node.module or "")
        for one in node.names:
            self.state.names[one.asname or one.name] = Dotted(one.name, path=f"{base}.{one.name}")
        return ""

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Signal:
        self.state.names[node.name] = Function(node.name, node=node, frame=self.frame)
        return ""

    def _class(self, node: ast.ClassDef) -> Signal:
        self.state.names[node.name] = Class(node.name, node=node, frame=self.frame)
        return ""

    def _if(self, node: ast.If) -> Signal:
        if _is_main_guard(node.test):
            return self.block(node.body)
        self.truth(node.test)
        self.guards.append(node.test)
        try:
            without = [is_without_cuda(node.test, taken=taken) for taken in (True, False)]
            return self._ways([node.body, node.orelse], without)
        finally:
            self.guards.pop()

    def _ways(self, blocks: Sequence[Sequence[ast.stmt]], without_cuda: Sequence[bool] = ()) -> Signal:
        """Read blocks of which one runs, and go on where they meet."""
        before, ends, signal, outer = self.state, [], "", self.without_cuda
        for row, one in enumerate(blocks):
            self.go(before.copy())
            self.without_cuda = outer or (row < len(without_cuda) and without_cuda[row])
            signal = self.block(one) or ""
            self.without_cuda = outer
            if not signal:
                ends.append(self.state)
        self.go(meet(before, ends) if ends else self.state)
        return "" if ends else signal

    def _match(self, node: ast.Match) -> Signal:
        self.value(node.subject)
        return self._ways([*[case.body for case in node.cases], []])

    def _try(self, node: ast.Try) -> Signal:
        before = self.state.copy()
        signal = self.block([*node.body, *node.orelse])
        ends = [] if signal else [self.state]
        failed = meet(before, [before, self.state])
        for handler in node.handlers:
            self.go(failed.copy())
            if handler.name:
                self.state.names[handler.name] = Value(handler.name)
            if not self._rarely(handler.body):
                ends.append(self.state)
        self.go(meet(before, ends) if ends else self.state)
        return self._rarely(node.finalbody) or ("" if ends else signal or "raise")

    def _rarely(self, block: Sequence[ast.stmt]) -> Signal:
        """Read a block that is there for failures."""
        self.guards.append(ast.Name("on_error", ast.Load()))
        try:
            return self.block(block)
        finally:
            self.guards.pop()

    def _for(self, node: ast.For | ast.AsyncFor) -> Signal:
        loop = self.bind_iteration(node.target, node.iter)
        loop.node = node
        return self._turns(loop, node.body, node.orelse, lambda: self.bind_iteration(node.target, node.iter))

    def _while(self, node: ast.While) -> Signal:
        loop = Loop(node, depth=len(self.functions))

        def test() -> None:
            self.loops.append(loop)
            self.truth(node.test)
            self.loops.pop()

        test()
        forever = isinstance(node.test, ast.Constant) and bool(node.test.value)
        return self._turns(loop, node.body, node.orelse, test, forever=forever)

    def _turns(
        self,
        loop: Loop,
        body: Sequence[ast.stmt],
        orelse: Sequence[ast.stmt],
        again: Callable[[], object],
        *,
        forever: bool = False,
    ) -> Signal:
        """Read a loop's body twice, so that what one turn leaves behind meets the next."""
        current, entry = self.state.current, self.state
        guards, self.guards = self.guards, []
        leaves: list[State] = []
        self.activations[-1].exits.append(leaves)
        self.loops.append(loop)
        ends: list[State] = []
        for turn in range(2 if len(self.loops) <= _MOST_PASSES_DEPTH else 1):
            if turn:
                again()
            signal = self.block(body)
            states = [*([] if signal in ("return", "raise", "break") else [self.state]), *leaves]
            ends = states
            if signal and signal != "continue":
                break
        self.loops.pop()
        self.activations[-1].exits.pop()
        self.guards = guards
        if not ends:
            # every way out of the body leaves the function; the loop may not have run at all
            if forever:
                return "return"
            ends = [entry]
        self.go(meet(entry, ends))
        self.state.current = current
        return self.block(orelse)

    def _leave(self, node: ast.Break | ast.Continue) -> Signal:
        if self.activations[-1].exits:
            self.activations[-1].exits[-1].append(self.state.copy())
        return "break" if isinstance(node, ast.Break) else "continue"

    def _return(self, node: ast.Return) -> Signal:
        value = self.value(node.value)
        self.activations[-1].returns.append((self.state, value))
        return "return"

    def _raise(self, node: ast.Raise) -> Signal:
        if node.exc is not None:
            self.value(node.exc)
        return "raise"

    def _assert(self, node: ast.Assert) -> Signal:
        self.truth(node.test)
        return ""


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and text_of(test.left) == "__name__"


_HANDLERS: dict[type[ast.stmt], Callable[..., Signal]] = {
    ast.Assign: Statements._assignment,
    ast.AnnAssign: Statements._annotated,
    ast.AugAssign: Statements._augmented,
    ast.Delete: Statements._delete,
    ast.Expr: Statements._expression,
    ast.Import: Statements._import,
    ast.ImportFrom: Statements._import_from,
    ast.FunctionDef: Statements._function,
    ast.AsyncFunctionDef: Statements._function,
    ast.ClassDef: Statements._class,
    ast.If: Statements._if,
    ast.Match: Statements._match,
    ast.Try: Statements._try,
    ast.For: Statements._for,
    ast.AsyncFor: Statements._for,
    ast.While: Statements._while,
    ast.Break: Statements._leave,
    ast.Continue: Statements._leave,
    ast.Return: Statements._return,
    ast.Raise: Statements._raise,
    ast.Assert: Statements._assert,
    ast.With: Statements._with,
    ast.AsyncWith: Statements._with,
}
if hasattr(ast, "TryStar"):  # Python 3.11
    _HANDLERS[ast.TryStar] = Statements._try
