"""A part of a tensor that all ranks have together, as `torch.distributed.checkpoint` wants to see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

__all__ = ["Box", "DcpTensor"]


@dataclass(frozen=True)
class Box:
    """Where a part lies in the whole, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def chunk(self) -> ChunkStorageMetadata:
        """The same in DCP's words."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


class DcpTensor(Tensor):
    """Looks like the whole tensor and has no memory of its own; it only answers DCP's questions.

    A save writes `source`, which lies at `box`, or if there is none the plain `value`. A load fills new memory,
    `loaded`, for what lies at `wanted`: until all ranks have all they need, nothing of the optimizer's may change. DCP
    asks for the list of chunks in a load alone.
    """

    box: Box | None
    wanted: Box | None
    source: Tensor | None
    value: Any
    trouble: str | None
    loaded: Tensor | None
    memory: torch.device

    @staticmethod
    def __new__(  # noqa: PLR0913
        cls,
        size: Sequence[int],
        dtype: torch.dtype,
        *,
        box: Box | None = None,
        wanted: Box | None = None,
        source: Tensor | None = None,
        value: Any = None,
        trouble: str | None = None,
        memory: torch.device | None = None,
    ) -> DcpTensor:
        """`box` is `None` on a rank that writes nothing, `wanted` on one that reads nothing."""
        host = torch.device("cpu")
        made: DcpTensor = Tensor._make_wrapper_subclass(cls, torch.Size(size), dtype=dtype, device=host)
        made.box, made.wanted, made.source, made.value = box, wanted, source, value
        made.trouble, made.loaded, made.memory = trouble, None, memory or host
        return made

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if self.trouble is not None:
            raise RuntimeError(self.trouble)
        if self.box is None:
            return []
        if self.source is None:
            return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
        chunk = self.box.chunk()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.source), torch.Size(self.shape))
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.wanted is None:
            return []
        self.loaded = torch.empty(self.wanted.sizes, dtype=self.dtype, device=self.memory)
        return [self.wanted.chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Any:
        if self.loaded is not None:
            return self.loaded
        return self.value if self.source is None else self.source

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.new_empty.default:
            # A copy that is staged for later: its attributes follow.
            return cls(args[1], args[0].dtype)
        raise TypeError(
            f"{function} has no meaning for a part of optimizer state that only torch.distributed.checkpoint's save "
            "and load understand: pass zerostep.dcp_state(optimizer) to them"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Piece({tuple(self.shape)}, {self.dtype}, box={self.box}, wanted={self.wanted})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "this part of optimizer state cannot be pickled: pass zerostep.dcp_state(optimizer) itself to the save of "
            "torch.distributed.checkpoint, with its default planner"
        )
