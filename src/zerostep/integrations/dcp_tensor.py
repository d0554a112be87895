"""A tensor that is spread over all ranks, in the form that `torch.distributed.checkpoint` (DCP) saves and loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zerostep.plan.blocks import Block


def region(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    """Return a part of a tensor: offset and size in each dimension."""
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def region_of(block: Block) -> ChunkStorageMetadata:
    """Return a block as a part of a tensor."""
    return region([span.start for span in block.spans], block.sizes)


class DcpTensor(Tensor):
    """Has the shape of the whole tensor but no memory; implements the methods by which DCP saves and loads it.

    A save writes `sources` to the regions `written`, or the plain `value` if there are no sources; it raises `problem`
    instead if there is one. A load reads the regions `wanted` into new memory, `loaded`: the optimizer must not change
    before all ranks have read everything. DCP calls `__create_chunk_list__` only in a load.
    """

    written: Sequence[ChunkStorageMetadata]
    wanted: Sequence[ChunkStorageMetadata]
    sources: Sequence[Tensor] | None
    value: Any
    problem: str | None
    loaded: Sequence[Tensor] | None
    load_device: torch.device

    @staticmethod
    def __new__(  # noqa: PLR0913
        cls,
        size: Sequence[int],
        dtype: torch.dtype,
        *,
        written: Sequence[ChunkStorageMetadata] = (),
        wanted: Sequence[ChunkStorageMetadata] = (),
        sources: Sequence[Tensor] | None = None,
        value: Any = None,
        problem: str | None = None,
        load_device: torch.device | None = None,
    ) -> DcpTensor:
        """`written` is empty on a rank that writes nothing, `wanted` on one that reads nothing."""
        host = torch.device("cpu")
        tensor: DcpTensor = Tensor._make_wrapper_subclass(cls, torch.Size(size), dtype=dtype, device=host)
        tensor.written, tensor.wanted, tensor.sources, tensor.value = written, wanted, sources, value
        tensor.problem, tensor.loaded, tensor.load_device = problem, None, load_device or host
        return tensor

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if self.problem is not None:
            raise RuntimeError(self.problem)
        if not self.written:
            return []
        if self.sources is None:
            return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
        return [
            WriteItem(
                MetadataIndex(fqn, part.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(part, TensorProperties.create_from_tensor(source), torch.Size(self.shape)),
            )
            for part, source in zip(self.written, self.sources, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self.loaded = [torch.empty(part.sizes, dtype=self.dtype, device=self.load_device) for part in self.wanted]
        return list(self.wanted)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Any:
        if self.loaded is not None:
            return self.loaded[_find(self.wanted, index)]
        return self.value if self.sources is None else self.sources[_find(self.written, index)]

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


def _find(parts: Sequence[ChunkStorageMetadata], index: MetadataIndex) -> int:
    """The position of the region that DCP means: by its offsets, or the only one."""
    return next((at for at, part in enumerate(parts) if part.offsets == index.offset), 0)
