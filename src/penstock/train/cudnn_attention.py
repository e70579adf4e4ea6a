"""cuDNN's attention over documents that lie end to end, by its Python interface (the package nvidia-cudnn-frontend).

In: query [N, heads, head], key and value [N, key heads, head] in half precision, the documents' borders in N, ascending
and filled up with N: [places + 1]. Out: [N, heads, head]; a position sees itself and the earlier ones of its document.

PyTorch reaches the same kernels, but only for rows without documents, or else describes them to cuDNN anew at each
call, 60 ms. Here a description is made once for each shape, tenths of a second, and kept for the life of the process.
Time grows with the places, used or not: there should be few more than there are documents.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["PACKAGE", "attended_documents", "is_available"]

# Hopper and later, for which cuDNN has kernels that PyTorch's own don't come near.
OLDEST_CAPABILITY = (9, 0)
PACKAGE = "nvidia-cudnn-frontend"


@cache
def is_available() -> bool:
    """Whether the package is installed, and the GPU one for which it pays."""
    if importlib.util.find_spec("cudnn") is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= OLDEST_CAPABILITY


def attended_documents(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int) -> Tensor:
    """See the module; no document is longer than `longest`."""
    mixed, _ = torch.ops.penstock.cudnn_attention(query, key, value, borders, longest)
    output: Tensor = mixed
    return output


@torch.library.custom_op("penstock::cudnn_attention", mutates_args=())
def _forward(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """The mixed values, and the log of each position's sum of exponents."""
    num_documents = len(borders) - 1
    mixed = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sums = torch.empty(num_documents, query.shape[1], longest, 1, dtype=torch.float32, device=query.device)
    graph = _forward_graph(num_documents, longest, query.dtype, *_layouts(query, key, value))
    tensors = {"query": query, "key": key, "value": value, "mixed": mixed, "sums": sums}
    graph.run(tensors, borders)
    return mixed, sums


@torch.library.custom_op("penstock::cudnn_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, sums: Tensor, borders: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    num_documents, longest = len(borders) - 1, sums.shape[2]
    query_gradient, key_gradient, value_gradient = (
        torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (query, key, value)
    )
    graph = _backward_graph(
        num_documents, longest, len(query), query.dtype, *_layouts(query, key, value, mixed, gradient)
    )
    tensors = {
        "gradient": gradient,
        "query": query,
        "key": key,
        "value": value,
        "mixed": mixed,
        "sums": sums,
        "query_gradient": query_gradient,
        "key_gradient": key_gradient,
        "value_gradient": value_gradient,
    }
    graph.run(tensors, borders)
    return query_gradient, key_gradient, value_gradient


@_forward.register_fake
def _forward_shapes(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    sums = query.new_empty((len(borders) - 1, query.shape[1], longest, 1), dtype=torch.float32)
    return torch.empty(query.shape, dtype=query.dtype, device=query.device), sums


@_backward.register_fake
def _backward_shapes(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, sums: Tensor, borders: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    made = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (query, key, value))
    query_gradient, key_gradient, value_gradient = made
    return query_gradient, key_gradient, value_gradient


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, borders, _ = inputs
    ctx.save_for_backward(query, key, value, *output, borders)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, mixed, sums, borders = ctx.saved_tensors
    made = torch.ops.penstock.cudnn_attention_backward(gradient, query, key, value, mixed, sums, borders)
    return (*made, None, None)


_forward.register_autograd(_gradients, setup_context=_keep)

Layout = tuple[int, int, int, int]
"""Heads, numbers of a head, stride of a position, stride of a head."""


def _layouts(*tensors: Tensor) -> tuple[Layout, ...]:
    """The same graph serves tensors of the same layout."""
    return tuple((each.shape[1], each.shape[2], each.stride(0), each.stride(1)) for each in tensors)


class _Graph:
    """A graph that is being described, then built, then run any number of times."""

    def __init__(self, num_documents: int, longest: int, dtype: torch.dtype) -> None:
        import cudnn

        self._cudnn = cudnn
        self._handle = _handle(torch.cuda.current_device())
        self._num_documents, self._longest = num_documents, longest
        self._tensors: dict[str, Any] = {}
        self._offsets: dict[int, Any] = {}  # by the stride of a position
        kinds = cudnn.data_type
        self.graph = cudnn.pygraph(
            io_data_type=kinds.BFLOAT16 if dtype == torch.bfloat16 else kinds.HALF,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self._handle,
        )
        self.lengths = self._small(num_documents, kinds.INT32)

    def packed(self, name: str, layout: Layout) -> Any:
        """An input of documents end to end."""
        heads, size, position_stride, head_stride = layout
        return self.place(
            name,
            self.graph.tensor(
                name=name,
                dim=[self._num_documents, heads, self._longest, size],
                stride=[self._longest * position_stride, head_stride, position_stride, 1],
            ),
            layout,
        )

    def place(self, name: str, tensor: Any, layout: Layout) -> Any:
        """Says where the documents of a packed tensor lie."""
        stride = layout[2]
        if stride not in self._offsets:
            self._offsets[stride] = self._small(self._num_documents + 1, self._cudnn.data_type.INT64)
        tensor.set_ragged_offset(self._offsets[stride])
        self._tensors[name] = tensor
        return tensor

    def output(self, name: str, tensor: Any, heads: int, size: int) -> None:
        """A packed output, contiguous."""
        layout = (heads, size, heads * size, size)
        tensor.set_output(True).set_dim([self._num_documents, heads, self._longest, size])
        tensor.set_stride([self._longest * heads * size, size, heads * size, 1])
        self.place(name, tensor, layout)

    def sums(self, tensor: Any | None, heads: int) -> Any:
        """The sums of exponents, padded: an output if `tensor` is given, else an input."""
        dim, stride = [self._num_documents, heads, self._longest, 1], [heads * self._longest, self._longest, 1, 1]
        kind = self._cudnn.data_type.FLOAT
        if tensor is None:
            tensor = self.graph.tensor(name="sums", dim=dim, stride=stride, data_type=kind)
        else:
            tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)
        self._tensors["sums"] = tensor
        return tensor

    def _small(self, places: int, kind: Any) -> Any:
        return self.graph.tensor(dim=[places, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind)

    def build(self) -> _Graph:
        """Chooses the kernels.

        Raises:
            RuntimeError: cuDNN has none for these shapes, on this GPU, in its version here.
        """
        try:
            self.graph.validate()
            self.graph.build_operation_graph()
            self.graph.create_execution_plans([self._cudnn.heur_mode.A, self._cudnn.heur_mode.FALLBACK])
            self.graph.check_support()
            self.graph.build_plans()
        except self._cudnn.cudnnGraphNotSupportedError as error:
            raise RuntimeError(f"cuDNN has no attention kernel for documents of this shape: {error}") from error
        return self

    def run(self, tensors: dict[str, Tensor], borders: Tensor) -> None:
        """Queues the graph on the current stream."""
        self._cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        bound = {self._tensors[name]: tensor for name, tensor in tensors.items()}
        bound[self.lengths] = borders.diff().view(-1, 1, 1, 1)
        wide = borders.long()
        for stride, offsets in self._offsets.items():
            bound[offsets] = (wide * stride).view(-1, 1, 1, 1)
        workspace = torch.empty(self.graph.get_workspace_size(), dtype=torch.uint8, device=borders.device)
        self.graph.execute(bound, workspace, handle=self._handle)


@cache
def _handle(device: int) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@cache
def _forward_graph(
    num_documents: int, longest: int, dtype: torch.dtype, query: Layout, key: Layout, value: Layout
) -> _Graph:
    made = _Graph(num_documents, longest, dtype)
    mixed, sums = made.graph.sdpa(
        q=made.packed("query", query),
        k=made.packed("key", key),
        v=made.packed("value", value),
        generate_stats=True,
        attn_scale=query[1] ** -0.5,
        use_causal_mask=True,
        use_padding_mask=True,
        seq_len_q=made.lengths,
        seq_len_kv=made.lengths,
    )
    made.output("mixed", mixed, query[0], value[1])
    made.sums(sums, query[0])
    return made.build()


@cache
def _backward_graph(
    num_documents: int,
    longest: int,
    total: int,
    dtype: torch.dtype,
    query: Layout,
    key: Layout,
    value: Layout,
    mixed: Layout,
    gradient: Layout,
) -> _Graph:
    made = _Graph(num_documents, longest, dtype)
    gradients = made.graph.sdpa_backward(
        q=made.packed("query", query),
        k=made.packed("key", key),
        v=made.packed("value", value),
        o=made.packed("mixed", mixed),
        dO=made.packed("gradient", gradient),
        stats=made.sums(None, query[0]),
        attn_scale=query[1] ** -0.5,
        use_causal_mask=True,
        use_padding_mask=True,
        seq_len_q=made.lengths,
        seq_len_kv=made.lengths,
        max_total_seq_len_q=total,
        max_total_seq_len_kv=total,
    )
    for name, tensor, layout in zip(("query", "key", "value"), gradients, (query, key, value), strict=True):
        made.output(f"{name}_gradient", tensor, layout[0], layout[1])
    return made.build()
