"""A model with its caches: what a step wrote is there at the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from pagedattn import contract, gqa
from pagedattn.errors import InvalidArgumentError
from pagedattn.jit import cuda
from pagedattn.onnx.reference import reference_ops
from pagedattn.onnx.types import numpy_type
from pagedattn.validate import expected


class Cache(NamedTuple):
    """A graph input that holds a cache.

    Attributes
    ----------
    name : str
        The graph input.
    output : str
        The graph output with its next value; "" if the graph does not return it.
    initial : int or None
        Its extent along axis 2 before the first step, when nothing else is said.
    """

    name: str
    output: str
    initial: int | None


def caches_of(model: onnx.ModelProto) -> list[Cache]:
    """The graph inputs that attention nodes use as caches, in the order of the graph's inputs."""
    graph = model.graph
    order = {info.name: place for place, info in enumerate(graph.input)}
    outputs = {info.name for info in graph.output}
    found = {}
    for node in graph.node:
        if node.domain != contract.DOMAIN or node.op_type not in (contract.NAME, gqa.NAME):
            continue
        initial = _initial_length(node) if node.op_type == gqa.NAME else None
        for index, out in ((3, 1), (4, 2)):  # key and value, in both operators
            name = node.input[index] if index < len(node.input) else ""
            if name in order:
                result = node.output[out] if out < len(node.output) else ""
                found[name] = Cache(name, result if result in outputs else "", initial)
    return sorted(found.values(), key=lambda cache: order[cache.name])


def _initial_length(node: onnx.NodeProto) -> int:
    """Rows of a GroupQueryAttention cache that grows from nothing, or of one that holds a window."""
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    return max(0, attributes.get("local_window_size", 0)) if attributes.get("sliding_window_cache") else 0


def _evaluator_with(ops: list[type[Any]]) -> type[ReferenceEvaluator]:
    """An evaluator class that has these operators also inside the model's functions, for which it makes evaluators."""

    class Evaluator(ReferenceEvaluator):  # type: ignore[misc]
        def __init__(self, proto: Any, *args: Any, new_ops: Any = None, **options: Any) -> None:
            super().__init__(proto, *args, new_ops=[*(new_ops or ()), *ops], **options)

    return Evaluator


class Session:
    """Run a model step by step on `onnx.reference.ReferenceEvaluator`, its attention nodes on this library.

    Caches are the graph inputs that are key_cache or value_cache of a PagedAttention node, or past_key or past_value of
    a GroupQueryAttention node. They need not be fed: the session makes them at the first step and keeps them.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
    dims : mapping of str to int
        Values of symbolic dimensions of the caches, such as ``{"num_blocks": 64}``. Those that an input of the first
        step shows need not be given, nor the length of a GroupQueryAttention cache, which then starts empty and grows,
        or as long as its window if it slides.
    device : {"cpu", "cuda"}
        Where the caches are. On "cuda" they are CuPy arrays, attention runs on the GPU, and everything else on NumPy.
    backend : str, optional
        Force a backend of `pagedattn.paged_attention`.
    new_ops : iterable of OpRun classes
        More operators, which go before those of this library.

    Attributes
    ----------
    caches : dict of str to array
        The caches by graph input; may be read, replaced and written to between steps.
    input_names : list of str
        Graph inputs to feed: all but the caches.
    output_names : list of str

    Examples
    --------
    >>> session = Session("decoder.onnx", {"num_blocks": 64})  # doctest: +SKIP
    >>> (logits,) = session.run(["logits"], {"input_ids": ids, "block_table": table, ...})  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | PathLike[str] | bytes | onnx.ModelProto,
        dims: Mapping[str, int] | None = None,
        *,
        device: str = "cpu",
        backend: str | None = None,
        new_ops: Iterable[type[Any]] = (),
    ) -> None:
        if device not in ("cpu", "cuda"):
            raise InvalidArgumentError(expected("device", "cpu or cuda", repr(device)))
        if isinstance(model, bytes):
            model = onnx.load_model_from_string(model)
        elif not isinstance(model, onnx.ModelProto):
            model = onnx.load(model)
        if device == "cuda":
            cuda.require_device()
        self._types = {info.name: info.type.tensor_type for info in model.graph.input}
        self._caches = caches_of(model)
        self._dims = dict(dims or {})
        self._xp: Any = np if device == "cpu" else cuda.cupy()
        self._evaluator = _evaluator_with([*new_ops, *reference_ops(model, backend)])(model)
        initializers = {tensor.name for tensor in model.graph.initializer}
        kept = {cache.name for cache in self._caches}
        self.input_names = [name for name in self._types if name not in kept and name not in initializers]
        self.output_names = [info.name for info in model.graph.output]
        computed = {name for node in model.graph.node for name in node.output if name}
        self._values = computed | set(self._types) | initializers
        self.caches: dict[str, Any] = {}

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run one step.

        Parameters
        ----------
        output_names : sequence of str, or None
            None returns all outputs; any other value of the graph may be asked for by name.
        feeds : mapping of str to array
            The inputs by name. A cache among them takes the place of the one that the session has.

        Returns
        -------
        list of arrays

        Raises
        ------
        InvalidArgumentError
            A name is not the model's, an input is absent, or an attention node breaks its contract.
        """
        wanted = list(self.output_names if output_names is None else output_names)
        outputs = ", ".join(self.output_names)
        for name in wanted:
            if name not in self._values:
                raise InvalidArgumentError(
                    expected("output_names", f"values of the model, whose outputs are {outputs}", repr(name))
                )
        for name in feeds:
            if name not in self._types:
                raise InvalidArgumentError(expected("feeds", f"inputs among {', '.join(self._types)}", repr(name)))
        for name in self.input_names:
            if name not in feeds:
                raise InvalidArgumentError(f"{name}: required input of the model, got none.")
        for cache in self._caches:
            if cache.name in feeds:
                self.caches[cache.name] = feeds[cache.name]
            elif cache.name not in self.caches:
                self.caches[cache.name] = self._allocate(cache, feeds)
        more = [cache.output for cache in self._caches if cache.output and cache.output not in wanted]
        results = self._evaluator.run([*wanted, *more], {**feeds, **self.caches})
        named = dict(zip([*wanted, *more], results, strict=True))
        for cache in self._caches:
            if cache.output:
                self.caches[cache.name] = named[cache.output]
        return [named[name] for name in wanted]

    def reset(self) -> None:
        """Forget the caches; the next step makes new ones."""
        self.caches.clear()

    def _allocate(self, cache: Cache, feeds: Mapping[str, Any]) -> Any:
        known = {**self._shown(feeds), **self._dims}
        tensor = self._types[cache.name]
        shape = []
        for axis, dim in enumerate(tensor.shape.dim):
            if dim.HasField("dim_value"):
                shape.append(dim.dim_value)
            elif dim.dim_param in known:
                shape.append(known[dim.dim_param])
            elif axis == 2 and cache.initial is not None:
                shape.append(cache.initial)
            else:
                name = dim.dim_param or f"dimension {axis} of {cache.name}, which has no name"
                raise InvalidArgumentError(f"dims: expected a value for {name}, got none. Or feed {cache.name}.")
        if not tensor.HasField("shape"):
            raise InvalidArgumentError(
                f"{cache.name}: expected a cache in the feeds, because the model shows no shape."
            )
        return self._xp.zeros(tuple(shape), numpy_type(tensor.elem_type))

    def _shown(self, feeds: Mapping[str, Any]) -> dict[str, int]:
        """Symbolic dimensions whose value an input shows."""
        return {
            dim.dim_param: extent
            for name, x in feeds.items()
            for dim, extent in zip(self._types[name].shape.dim, np.shape(x), strict=False)
            if dim.dim_param
        }
