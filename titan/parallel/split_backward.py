"""Backward passes in two parts: I for the gradients of a stage's inputs, W for those of its weights (zero bubble, arXiv:2401.10241).

An example: a linear layer y = x w. Its operation in autograd's graph lies on the way from the output to the input, and has a side branch,
the weight. In I it computes dx = dy w and dy is kept. In W it computes dw from dy and x. Three kinds of operations differ:

    torch's own      compute what is asked for: dx in I, dw in W
    functions        Python functions compute all at once. They run in I only, and W adds up what they found. So do weights in several places
    compiled blocks  their backward graph is cut in two by `splitting_backend`: I, and what only the weights' gradients need

Between I and W, an operation keeps what the forward pass saved for it if W runs it again; a compiled block keeps what its second graph reads.
All else is freed as I goes on. A block that is recomputed (torch.utils.checkpoint) is recomputed once, by the first part that needs it.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.distributed.tensor import DTensor

from . import torch_compat

_FUNCTION = torch._C._FunctionBase  # a Python function in autograd's graph


@dataclass(eq=False)
class _Saved:
    """A tensor that the forward pass saved for the backward pass. It can be freed while the graph lives."""

    value: Tensor | None
    recompute: Callable[[], None] | None = None


class _InputPass:
    """The pass I that runs: it frees what was saved for an operation once the next operation begins.

    Attributes:
        kept: operations that run again in W.
    """

    def __init__(self, kept: set[Node]) -> None:
        self.kept = kept
        self._task = 0
        self._node: Node | None = None
        self._read: list[_Saved] = []

    def reads(self, saved: _Saved) -> None:
        node, task = torch._C._current_autograd_node(), torch._C._current_graph_task_id()
        self._task = self._task or task + 1
        if (
            task + 1 != self._task
        ):  # a backward pass within an operation's, which may read again
            return
        if node is not self._node:
            self.free()
            self._node = node
        if node not in self.kept:
            self._read.append(saved)

    def free(self) -> None:
        while self._read:
            self._read.pop().value = None


_input_pass: _InputPass | None = None


def _unpack(saved: _Saved) -> Tensor:
    if saved.recompute is not None:
        saved.recompute()
    value = saved.value
    if _input_pass is not None:
        _input_pass.reads(saved)
    # A compiled block runs again in W, and reads nothing of what it saved.
    return torch.empty(0) if value is None else value


@contextmanager
def saving_for_two_passes() -> Iterator[None]:
    """Save tensors in a forward pass so that `backward_input` can free them, and recompute checkpointed blocks once for both passes."""
    with saved_tensors_hooks(_Saved, _unpack), torch_compat.checkpoint_hooks(_Recomputed):
        yield


class _Recomputed(saved_tensors_hooks):
    """Hooks of a checkpointed block, in place of torch's, which recompute it for each pass through the graph."""

    def __init__(self, frame: Any) -> None:
        self.frame: Any = frame
        self.saved: list[tuple[weakref.ref[_Saved], Any]] = []
        super().__init__(self._pack, _unpack)

    def _pack(self, value: Tensor) -> _Saved:
        saved = _Saved(None, self._recompute)
        self.saved.append((weakref.ref(saved), (value.shape, value.dtype)))
        return saved

    def _recompute(self) -> None:
        frame, self.frame = self.frame, None
        missing = self.saved[::-1]

        def fill(value: Tensor) -> None:
            found, kind = missing.pop()
            if kind != (value.shape, value.dtype):
                what = f"saved {value.shape}, {value.dtype} in place of {kind}"
                raise RuntimeError(f"a recomputed block {what}")
            if (saved := found()) is not None:
                saved.value, saved.recompute = value.detach(), None
            if not missing:
                raise _Stop

        try:
            with saved_tensors_hooks(fill, _unpack), torch.enable_grad():
                torch_compat.recompute(frame)
        except _Stop:
            return
        raise RuntimeError(
            f"a recomputed block saved {len(missing)} tensors fewer than its forward pass"
        )


class _Stop(Exception):
    """Everything that the backward pass needs is recomputed."""


@dataclass
class WeightPass:
    """Work that I leaves for W.

    Attributes:
        later: operations that compute gradients of weights: the operation, the gradients of its results, and the weights.
        found: weights whose gradients I has found, and these.
        owners: edges that keep the graph alive, since a Python function in it does not.
    """

    later: list[tuple[Node, tuple[Tensor | None, ...], list[Tensor]]]
    found: list[tuple[Tensor, Tensor]]
    owners: list[GradientEdge]


def backward_input(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None] | None, inputs: Sequence[Any]
) -> tuple[tuple[Tensor | None, ...], WeightPass]:
    """Compute the gradients of a stage's inputs.

    Args:
        outputs: outputs of the stage, or its loss.
        gradients: their gradients. None: the output is a loss, a scalar.
        inputs: inputs of the stage, tensors with and without gradients, and other values.

    Returns:
        The gradient of each input, or None, and what `backward_weight` takes.
    """
    global _input_pass
    given = gradients or [None] * len(outputs)
    pairs: list[tuple[Tensor, Any]] = [
        (x, g) for x, g in zip(outputs, given, strict=True) if x.requires_grad
    ]
    wanted: list[Any] = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    owners = [get_gradient_edge(x) for x, _ in pairs]
    roots = [edge.node for edge in owners]
    path = torch_compat.nodes_between(roots, [get_gradient_edge(x).node for x in wanted])
    branches: dict[Any, _Branches] = {n: _branches(n, path) for n in {*path, *roots}}
    users = Counter(node for found in branches.values() for node in found.below)
    now: dict[Any, Any] = {}  # weights, with their operation
    later: dict[Any, list[Tensor]] = {}
    for node, found in branches.items():
        is_function = isinstance(node, _FUNCTION)
        # Without a way to an input, I would not come here at all.
        is_shared = node not in path or any(users[n] > 1 for n in found.below)
        is_shared |= is_function and found.is_mixed
        if is_shared or is_function:
            now |= dict.fromkeys(found.weights, node)
        if found.below and not is_shared:
            own = found.direct if is_function else found.weights
            later[node] = [n.variable for n in own]
            if is_function:
                vars(node)["kept_for_weights"] = None
    seen: dict[Node, Any] = {}
    hooks = [node.register_prehook(partial(seen.__setitem__, node)) for node in later]
    kept = {node for node in later if not isinstance(node, _FUNCTION)}
    before, _input_pass = _input_pass, _InputPass(kept)
    try:
        found_now = torch.autograd.grad(
            [x for x, _ in pairs],
            [*wanted, *(GradientEdge(node, 0) for node in now)],
            [g for _, g in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        _input_pass.free()
    finally:
        _input_pass = before
        for hook in hooks:
            hook.remove()
    for x in outputs:
        if not x._is_view():  # autograd detaches no view in place
            x.detach_()
    # Of the functions, compiled blocks run again.
    kept |= {n for n in later.keys() - kept if n.kept_for_weights is not None}
    again = {w for n in kept for w in branches[n].direct}
    of_weights = zip(now, found_now[len(wanted) :], strict=True)
    work = WeightPass(
        [(n, seen[n], later[n]) for n in kept if n in seen and later[n]],
        [(w.variable, g) for w, g in of_weights if g is not None and w not in again],
        owners,
    )
    of_inputs = dict(zip(map(id, wanted), found_now, strict=False))
    return tuple(of_inputs.get(id(x)) for x in inputs), work


@dataclass
class _Branches:
    """Part of the graph that an operation leads to, without the ways to inputs.

    Attributes:
        below: all of it.
        weights: its leaves.
        direct: leaves that are parameters and arguments of the operation.
        is_mixed: one of these is also below another argument.
    """

    below: set[Any]
    weights: list[Any]
    direct: list[Any]
    is_mixed: bool


def _branches(node: Node, path: set[Node]) -> _Branches:
    children: list[Any] = [n for n, _ in node.next_functions if n is not None and n not in path]
    leaves = {n for n in children if _is_leaf(n)}
    direct = [n for n in leaves if isinstance(n.variable, nn.Parameter)]
    below, rest = set[Any](), [n for n in children if n not in leaves]
    while rest:
        if (n := rest.pop()) not in below:
            below.add(n)
            rest += [child for child, _ in n.next_functions if child is not None]
    found = below | leaves
    return _Branches(found, [*filter(_is_leaf, found)], direct, bool(below & leaves))


def _is_leaf(node: Node) -> bool:
    return node.name().endswith("AccumulateGrad")


def backward_weight(work: WeightPass) -> None:
    """Add the gradients of the weights that `backward_input` left."""
    while work.found:  # not by autograd, which would call hooks of weights again
        weight, gradient = work.found.pop()
        weight.grad = gradient.clone() if weight.grad is None else weight.grad + gradient
    while work.later:
        node, given, weights = work.later.pop()
        pairs = [(GradientEdge(node, n), g) for n, g in enumerate(given) if g is not None]
        torch_compat.run_backward(*zip(*pairs, strict=True), weights=weights)


@cache
def splitting_backend(name: str, mode: str | None = None) -> Callable[..., Any]:
    """Return a backend of torch.compile whose backward programs can run in two parts: one object, as programs are shared.

    Args:
        name: name of a backend that compiles by AOTAutograd.
        mode: mode of inductor.
    """
    backend = torch_compat.find_backend(name, mode)
    torch_compat.keep_saved_tensors()

    def compile(graph: fx.GraphModule, example: Sequence[Any]) -> Any:
        is_weight = [part for x in example for part in _are_weights(x)]
        with torch_compat.backward_compiler(partial(_compile_parts, is_weight)):
            return backend(graph, example)

    return compile


def _are_weights(x: Any) -> list[bool]:
    """Return, for an input of a graph, which of the values that its gradient consists of are gradients of a weight.

    That of a DTensor consists of its local tensor and, from torch 2.13, its mesh.
    """
    is_several = isinstance(x, DTensor) and x.requires_grad
    names = x.__tensor_flatten__()[0] if is_several else ["_local_tensor"]
    return [isinstance(x, nn.Parameter) and name == "_local_tensor" for name in names]


def _compile_parts(
    is_weight: Sequence[bool],
    compile: Callable[..., Any],
    graph: fx.GraphModule,
    example: Sequence[Any],
) -> Callable[[list[Any]], list[Any]]:
    """Compile a backward graph in two parts, and return a program that runs the part that the autograd node asks for."""
    outputs = list(graph.graph.nodes)[-1].args[0]
    *graphs, kept = _cut(graph, is_weight)
    first = compile(graphs[0], example)
    second = lambda values: graphs[1](*values)  # noqa: E731  perhaps only its inputs
    if any(n.op == "call_function" for n in graphs[1].graph.nodes):
        second = compile(graphs[1], [n.meta["val"] for n in kept])
    places = [[n for n, w in enumerate(is_weight) if w == y] for y in (0, 1)]

    def run(args: list[Any]) -> list[Any]:
        node: Any = torch._C._current_autograd_node()
        kept = vars(node).get("kept_for_weights", False)  # False: both parts run
        gradients, read = [*map(_placeholder, outputs)], kept

        def put(of_weights: bool, values: Sequence[Any]) -> None:
            for place, value in zip(places[of_weights], values, strict=False):
                gradients[place] = value

        if not isinstance(kept, list):
            results = first(args)
            put(False, results)
            read = [*results[len(places[0]) :]]
            del results
        if kept is None:
            node.kept_for_weights = read
            torch_compat.free_saved(node)
        else:
            put(True, second(read))
        args.clear()
        return gradients

    setattr(run, "_boxed_call", True)  # noqa: B010  inputs come in a list
    return run


def _placeholder(node: Any) -> Any:
    """Return a gradient that nobody reads: it has the right shape and takes no memory."""
    value = node.meta["val"] if isinstance(node, fx.Node) else node
    if not isinstance(value, Tensor):  # None, or the mesh of a DTensor
        return value
    if any(isinstance(n, torch.SymInt) for n in value.shape):
        return None  # no weight, and not read
    return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)


def _cut(
    graph: fx.GraphModule, is_weight: Sequence[bool]
) -> tuple[fx.GraphModule, fx.GraphModule, list[fx.Node]]:
    """Cut a backward graph in two.

    Returns:
        The graph of the gradients of all but weights, which also returns what the second one reads; the graph of the
        gradients of weights; and what it reads.
    """
    nodes = list(graph.graph.nodes)
    outputs = nodes.pop().args[0]
    if len(outputs) != len(is_weight):
        raise RuntimeError(
            f"a backward graph has {len(outputs)} gradients for {len(is_weight)} inputs, so it cannot be split"
        )
    rest, weights = (
        [x for x, w in zip(outputs, is_weight, strict=True) if w == y] for y in (0, 1)
    )
    needed = set[fx.Node]()
    todo = [n for n in nodes if n.op == "placeholder" or n.is_impure()]
    todo += [n for n in rest if isinstance(n, fx.Node)]
    while todo:
        if (node := todo.pop()) not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    ends = {n for n in weights if isinstance(n, fx.Node)}
    later = _with_small_inputs(set(nodes) - needed, ends)
    kept = _read(later, ends)
    inputs = [n for n in nodes if n.op == "placeholder"]
    bodies = [[n for n in nodes if n.op != "placeholder" and (n in later) == y] for y in (0, 1)]
    first = _graph(graph, inputs, bodies[0], [*rest, *kept])
    return first, _graph(graph, kept, bodies[1], weights, "tangents_"), kept


def _read(later: set[fx.Node], ends: set[fx.Node]) -> list[fx.Node]:
    """Return the values that the nodes of `later` read, and ends that are not among them."""
    read = {a for n in later for a in n.all_input_nodes} | ends
    return sorted(read - later)


def _with_small_inputs(later: set[fx.Node], ends: set[fx.Node]) -> set[fx.Node]:
    """Return `later` without what makes its inputs larger: of products, what leads to their operands, and short ways to ends.

    An example: the gradient of a norm's weight needs two activations in fp32, and is a vector.
    """
    products = {n for n in later if str(n.target).rpartition(".")[0].endswith("mm")}
    for end in sorted({a for n in products for a in n.all_input_nodes} | ends):
        above, todo = set(), [end]
        while todo:
            if (node := todo.pop()) in later and node not in above:
                above.add(node)
                todo += node.all_input_nodes
        sizes = [sum(map(_size, _read(x, ends))) for x in (later, later - above)]
        if not above & products and sizes[1] <= sizes[0]:
            later = later - above
    return later


def _size(node: fx.Node) -> int:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return 0
    # A length that varies counts as it is in this compilation.
    lengths = (n.node.hint if isinstance(n, torch.SymInt) else n for n in value.shape)
    return math.prod(n or 1 for n in lengths) * value.itemsize


def _graph(
    owner: fx.GraphModule,
    inputs: Sequence[fx.Node],
    body: Sequence[fx.Node],
    outputs: Sequence[Any],
    prefix: str = "",
) -> fx.GraphModule:
    """Return a graph of some nodes. Inductor takes inputs for gradients, whose memory changes, by their names."""
    new, env = fx.Graph(), {}
    for node in inputs:
        env[node] = new.placeholder(prefix + node.name)
        env[node].meta = dict(node.meta)
    for node in body:
        env[node] = new.node_copy(node, env.__getitem__)
    new.output(tuple(env[n] if isinstance(n, fx.Node) else n for n in outputs))
    return fx.GraphModule(owner, new)
