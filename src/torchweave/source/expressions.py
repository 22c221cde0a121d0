"""IDEA: what an expression's value is, as far as the file shows it."""

from __future__ import annotations

import ast
from collections.abc import Callable

from torchweave.source import clocks, methods, torch_calls
from torchweave.source.facts import Loop
from torchweave.source.run import Call, Run
from torchweave.source.values import (
    Class,
    Const,
    Dotted,
    Frame,
    Function,
    Instance,
    Items,
    Module,
    Tensor,
    Value,
    either,
    options,
    tensors_in,
)
from torchweave.source.words import TENSOR_ATTRIBUTES

_MOST_TEXT = 60


def text_of(node: ast.AST, depth: int = 6) -> str:
    """Return how a name, attribute, item or call is written; empty for anything else."""
    if depth == 0:
        return ""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = text_of(node.value, depth - 1)
        return f"{base}.{node.attr}"[:_MOST_TEXT] if base else node.attr
    if isinstance(node, ast.Subscript):
        base, index = text_of(node.value, depth - 1), text_of(node.slice, depth - 1)
        return f"{base}[{index}]"[:_MOST_TEXT] if base and index else ""
    if isinstance(node, ast.Constant):
        return repr(node.value)[:_MOST_TEXT]
    if isinstance(node, ast.Call):
        base = text_of(node.func, depth - 1)
        return f"{base}()"[:_MOST_TEXT] if base else ""
    return ""


class Expressions(Run):
    """Evaluates expressions."""

    methods: dict[ast.ClassDef, dict[str, ast.FunctionDef | ast.AsyncFunctionDef]]

    def value(self, node: ast.expr | None) -> Value:
        """Return an expression's value."""
        if node is None:
            return Const(value=None)
        if not self.enter():
            return Value()
        handler = _HANDLERS.get(type(node))
        result = handler(self, node) if handler else self._parts(node)
        self.depth -= 1
        return result

    def _parts(self, node: ast.expr) -> Value:
        """Evaluate whatever is inside an expression of no interest."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return Value()

    def _constant(self, node: ast.Constant) -> Value:
        return Const(repr(node.value)[:_MOST_TEXT], value=node.value)

    def _name(self, node: ast.Name) -> Value:
        found = self.frame.get(node.id)
        if found is None:
            # a name from elsewhere, or a builtin: the same value every time in this scope
            found = self.frame.names[node.id] = Value(node.id)
        return found

    def _attribute(self, node: ast.Attribute) -> Value:
        return self._attribute_of_any(self.value(node.value), node)

    def _attribute_of_any(self, base: Value, node: ast.Attribute) -> Value:
        return either(*(self._attribute_of(one, node) for one in options(base)[:4])) if options(base) else Value()

    def _attribute_of(self, base: Value, node: ast.Attribute) -> Value:
        if isinstance(base, Dotted):
            return Dotted(base.path + "." + node.attr, path=base.path + "." + node.attr)
        if isinstance(base, Tensor):
            if node.attr in TENSOR_ATTRIBUTES:
                return base
            return self.attribute(base, node.attr, text_of(node))
        if isinstance(base, Instance) and base.cls is not None:
            method = self.method_of(base.cls, node.attr)
            if method is not None and (base, node.attr) not in self.state.heap:
                is_static = any(text_of(d) == "staticmethod" for d in getattr(method.node, "decorator_list", []))
                bound = Function(text_of(node), node=method.node, frame=method.frame, owner=None if is_static else base)
                return self._property(bound) if self._is_property(method) else bound
        return self.attribute(base, node.attr, text_of(node))

    @staticmethod
    def _is_property(function: Function) -> bool:
        decorators = getattr(function.node, "decorator_list", [])
        return any(text_of(one).rpartition(".")[2] in ("property", "cached_property") for one in decorators)

    def _property(self, function: Function) -> Value:
        node = ast.Call(func=ast.Name(id=function.text, ctx=ast.Load()), args=[], keywords=[])
        if function.node is not None and isinstance(function.node, ast.stmt):
            ast.copy_location(node, function.node)
        return self.inline(function, Call(node, function.text, None, [], {}, starred=False))

    def method_of(self, cls: Class, name: str, depth: int = 4) -> Function | None:
        """Return a method of a class or of its bases in this file."""
        if cls.node is None or depth == 0:
            return None
        if cls.node not in self.methods:
            functions = [one for one in cls.node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
            self.methods[cls.node] = {one.name: one for one in reversed(functions)}
        if name in self.methods[cls.node]:
            return Function(name, node=self.methods[cls.node][name], frame=cls.frame)
        for base in cls.node.bases:
            found = cls.frame.get(base.id) if isinstance(base, ast.Name) and cls.frame else None
            if isinstance(found, Class):
                method = self.method_of(found, name, depth - 1)
                if method is not None:
                    return method
        return None

    def unknown_part(self, base: Value, name: str, text: str) -> Value:
        """Return what a class says about an attribute of its objects, if it says anything."""
        if isinstance(base, Instance) and base.cls is not None:
            found = self.class_attribute(base.cls, name)
            if found is not None:
                found.text = text
                return found
        return Value(text)

    def class_attribute(self, cls: Class, name: str) -> Value | None:
        """Return what a class's methods set an attribute to, where that is one kind of thing."""
        raise NotImplementedError

    def _subscript(self, node: ast.Subscript) -> Value:
        base, index = self.value(node.value), self.value(node.slice)
        results = [self._item_of(one, index, node) for one in options(base)[:4]]
        return either(*results) if results else Value()

    def _item_of(self, base: Value, index: Value, node: ast.Subscript) -> Value:
        if isinstance(base, Items) and isinstance(index, Const):
            if base.keys and index.value in base.keys:
                return base.items[base.keys.index(index.value)]
            if not base.keys and isinstance(index.value, int) and -len(base.items) <= index.value < len(base.items):
                return base.items[index.value]
            if base.keys == (None,) and any(True for _ in tensors_in(base)):
                return base.items[0]  # one of many, all made alike
        if isinstance(base, Tensor):
            masks = [one for one in tensors_in(index) if one.mask and one.device != "cpu"]
            if masks:
                self.download(node, masks[0], "indexing by a boolean mask")
            if list(tensors_in(index)):
                return self.compute(node, [base, index])
            return base
        key = text_of(node.slice)
        if not key:
            return self.element_of(base)
        part = self.attribute(base, f"[{key}]", text_of(node))
        if type(part) is Value and not isinstance(index, Const):
            part.many = True
        return part

    def element_of(self, base: Value) -> Value:
        """Return what an item of a container can be."""
        found = [item for one in options(base) if isinstance(one, Items) for item in one.items]
        if found:
            return either(*found[:8])
        return Value()

    def _call(self, node: ast.Call) -> Value:
        if isinstance(node.func, ast.Attribute):
            receiver: Value | None = self.value(node.func.value)
            function = self._attribute_of_any(receiver or Value(), node.func)
        else:
            receiver, function = None, self.value(node.func)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else text_of(node.func)
        args = [self.value(one) for one in node.args]
        keywords = {one.arg or "**": self.value(one.value) for one in node.keywords}
        starred = "**" in keywords or any(isinstance(one, ast.Starred) for one in node.args)
        call = Call(node, name, receiver, args, keywords, starred)
        results = [self._call_of(one, call) for one in options(function)[:4]]
        return either(*results) if results else Value()

    def _call_of(self, function: Value, call: Call) -> Value:
        if isinstance(function, Function):
            return self.inline(function, call)
        if isinstance(function, Class):
            return self.instantiate(function, call)
        if isinstance(function, Instance) and function.cls is not None:
            for name in ("forward", "__call__"):
                method = self.method_of(function.cls, name)
                if method is not None:
                    return self.inline(Function(name, node=method.node, frame=method.frame, owner=function), call)
        if isinstance(function, Dotted):
            return self.call_path(function.path, call)
        if isinstance(function, Module):
            return self.compute(call.node, call.args, function.device if not call.args else "")
        return self.call_method(function, call)

    def instantiate(self, cls: Class, call: Call) -> Value:
        """Make an object of a class of this file."""
        made = Instance(cls.text, cls=cls)
        method = self.method_of(cls, "__init__")
        if method is not None:
            self.inline(Function("__init__", node=method.node, frame=method.frame, owner=made), call)
        return made

    def _binary(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Sub):
            clocks.subtract(self, left, right)
        if any(True for _ in tensors_in(left)) or any(True for _ in tensors_in(right)):
            return self.compute(node, [left, right])
        if isinstance(left, Items) and isinstance(right, Items) and isinstance(node.op, ast.Add):
            return Items(items=left.items + right.items)
        return Value()

    def _unary(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            self.truth(node.operand)
            return Value()
        value = self.value(node.operand)
        return self.compute(node, [value]) if any(True for _ in tensors_in(value)) else Value()

    def _compare(self, node: ast.Compare) -> Value:
        values = [self.value(node.left), *map(self.value, node.comparators)]
        if any(isinstance(one, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for one in node.ops):
            return Value()
        if any(True for value in values for _ in tensors_in(value)):
            result = self.compute(node, values)
            result.mask = True
            return result
        return Value()

    def truth(self, node: ast.expr) -> None:
        """Evaluate a test; a tensor's truth makes the host wait."""
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                self.truth(part)
            return
        tested = self.value(node)
        for one in options(tested):
            if isinstance(one, Tensor) and len(options(tested)) == 1 and not isinstance(node, ast.Constant):
                self.download(node, one, "a test of a tensor's value")

    def _bool(self, node: ast.BoolOp) -> Value:
        return either(*map(self.value, node.values))

    def _either(self, node: ast.IfExp) -> Value:
        self.truth(node.test)
        self.guards.append(node.test)
        result = either(self.value(node.body), self.value(node.orelse))
        self.guards.pop()
        return result

    def _display(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        return Items(items=tuple(map(self.value, node.elts)))

    def _dict(self, node: ast.Dict) -> Value:
        values = tuple(map(self.value, node.values))
        keys = tuple(one.value if isinstance(one, ast.Constant) else None for one in node.keys)
        return Items(items=values, keys=keys)

    def _lambda(self, node: ast.Lambda) -> Value:
        return Function("lambda", node=node, frame=self.frame)

    def _named(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self.assign(node.target, value)
        return value

    def _starred(self, node: ast.Starred) -> Value:
        return self.value(node.value)

    def _waited(self, node: ast.Await | ast.Yield | ast.YieldFrom) -> Value:
        value = self.value(node.value) if node.value else Const(value=None)
        self.keep(value)
        if isinstance(node, ast.Yield):
            self.at_yield(value)
        return Value()

    def at_yield(self, value: Value) -> None:
        """Do what happens at a yield."""
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Value) -> None:
        """Assign to a target."""
        raise NotImplementedError

    def bind_iteration(self, target: ast.expr, iterable: ast.expr) -> Loop:
        """Enter a loop over something, and bind its target."""
        raise NotImplementedError

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        outer = self.frame
        self.frame = Frame(names=self.state.names, outer=outer.outer)
        try:
            return self._comprehension_inside(node)
        finally:
            self.frame = outer

    def _comprehension_inside(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        shadowed = dict(self.state.names)
        for one in node.generators:
            loop = self.bind_iteration(one.target, one.iter)
            loop.comprehension = True
            self.loops.append(loop)
            for test in one.ifs:
                self.truth(test)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        values = [self.value(part) for part in parts]
        del self.loops[len(self.loops) - len(node.generators) :]
        for name in list(self.state.names):
            if name not in shadowed:
                del self.state.names[name]
        self.state.names.update(shadowed)
        return Items(items=(values[-1],), keys=(None,))

    def _joined(self, node: ast.JoinedStr) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.value(part.value)
                if isinstance(value, Tensor):
                    self.download(part.value, value, "formatting a tensor")
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and str(first.value).startswith("cuda:"):
            return Const(value="cuda")  # f"cuda:{rank}"
        return Value()

    def call_path(self, path: str, call: Call) -> Value:
        """Do what a call by an imported path does."""
        return torch_calls.call(self, path, call)

    def call_method(self, function: Value, call: Call) -> Value:
        """Do what a call of a method, or of a value that is not known, does."""
        return methods.call(self, function, call)

    def opaque(self, call: Call, *, imported: bool = False) -> Value:
        """Reckon with a call into code that is not in sight; `imported` is what another file defines."""
        return methods.opaque(self, call, imported=imported)


_HANDLERS: dict[type[ast.expr], Callable[..., Value]] = {
    ast.Constant: Expressions._constant,
    ast.Name: Expressions._name,
    ast.Attribute: Expressions._attribute,
    ast.Subscript: Expressions._subscript,
    ast.Call: Expressions._call,
    ast.BinOp: Expressions._binary,
    ast.UnaryOp: Expressions._unary,
    ast.Compare: Expressions._compare,
    ast.BoolOp: Expressions._bool,
    ast.IfExp: Expressions._either,
    ast.Tuple: Expressions._display,
    ast.List: Expressions._display,
    ast.Set: Expressions._display,
    ast.Dict: Expressions._dict,
    ast.Lambda: Expressions._lambda,
    ast.NamedExpr: Expressions._named,
    ast.Starred: Expressions._starred,
    ast.Await: Expressions._waited,
    ast.Yield: Expressions._waited,
    ast.YieldFrom: Expressions._waited,
    ast.ListComp: Expressions._comprehension,
    ast.SetComp: Expressions._comprehension,
    ast.GeneratorExp: Expressions._comprehension,
    ast.DictComp: Expressions._comprehension,
    ast.JoinedStr: Expressions._joined,
}
