"""A tensor that is spread over all ranks, in the form that `torch.distributed.checkpoint` (DCP) saves and loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


def region(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    """Return a part of a tensor: offset and size in each dimension."""
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


class DcpTensor(Tensor):
    """Has the shape of the whole tensor but no memory; implements the methods by which DCP saves and loads it.

    A save writes `source` to the region `written`, or the plain `value` if there is no source; it raises `problem`
    instead if there is one. A load reads the region `wanted` into new memory, `loaded`: the optimizer must not change
    before all ranks have read everything. DCP calls `__create_chunk_list__` only in a load.
    """

    written: ChunkStorageMetadata | None
    wanted: ChunkStorageMetadata | None
    source: Tensor | None
    value: Any
    problem: str | None
    loaded: Tensor | None
    load_device: torch.device

    @staticmethod
    def __new__(  # noqa: PLR0913
        cls,
        size: Sequence[int],
        dtype: torch.dtype,
        *,
        written: ChunkStorageMetadata | None = None,
        wanted: ChunkStorageMetadata | None = None,
        source: Tensor | None = None,
        value: Any = None,
        problem: str | None = None,
        load_device: torch.device | None = None,
    ) -> DcpTensor:
        """`written` is `None` on a rank that writes nothing, `wanted` on one that reads nothing."""
        host = torch.device("cpu")
        tensor: DcpTensor = Tensor._make_wrapper_subclass(cls, torch.Size(size), dtype=dtype, device=host)
        tensor.written, tensor.wanted, tensor.source, tensor.value = written, wanted, source, value
        tensor.problem, tensor.loaded, tensor.load_device = problem, None, load_device or host
        return tensor

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if self.problem is not None:
            raise RuntimeError(self.problem)
        if self.written is None:
            return []
        if self.source is None:
            return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
        data = TensorWriteData(self.written, TensorProperties.create_from_tensor(self.source), torch.Size(self.shape))
        return [WriteItem(MetadataIndex(fqn, self.written.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.wanted is None:
            return []
        self.loaded = torch.empty(self.wanted.sizes, dtype=self.dtype, device=self.load_device)
        return [self.wanted]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Any:
        if self.loaded is not None:
            return self.loaded
        return self.value if self.source is None else self.source

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.new_empty.default:
            # DCP stages a copy for an asynchronous save with deepcopy, which then copies the attributes too.
            return cls(args[1], args[0].dtype)
        raise TypeError(
            f"{function} has no meaning for a part of optimizer state that only torch.distributed.checkpoint's save "
            "and load understand: pass zerostep.dcp_state(optimizer) to them"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DcpTensor({tuple(self.shape)}, {self.dtype}, written={self.written}, wanted={self.wanted})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "this part of optimizer state cannot be pickled: pass zerostep.dcp_state(optimizer) itself to the save of "
            "torch.distributed.checkpoint, with its default planner"
        )
