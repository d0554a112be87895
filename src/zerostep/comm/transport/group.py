"""The transport over a torch process group, and the Gloo group that it makes for a companion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world as torch_world

from zerostep.comm.transport.base import BaseTransport, as_bytes, as_real
from zerostep.comm.transport.companion import CompanionTransport, connect_companion
from zerostep.comm.transport.ints import PendingInts, ints_on_device, ints_on_host
from zerostep.comm.transport.presence import Presence
from zerostep.comm.transport.protocol import TAG_DATA
from zerostep.comm.transport.rows import all_gather_rows
from zerostep.comm.transport.tags import wire_tag
from zerostep.comm.transport.transfer import Transfer, start


class GroupTransport(BaseTransport):
    """A transport over a torch process group."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device | None = None, presence: Presence | None = None
    ) -> None:
        self._group, self._device = group, device
        self._backends = _backends(group)  # asked for in every step, also when torch has forgotten the group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        self.presence = presence or Presence(ranks, self.rank)
        self.peers = self.presence.numbers_of(ranks)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return self._group

    @cached_property
    def wire_device(self) -> torch.device:
        """The host if the group serves it, else the device of the parameters, else the current accelerator."""
        device_types = list(self._backends)
        if "cpu" in device_types:
            return torch.device("cpu")
        if self._device is not None and self._device.type in device_types:
            return self._device
        return torch.device(device_types[0], torch.accelerator.current_device_index())

    def stream_ordered(self, device: torch.device) -> bool:
        """True if the backend serves accelerators alone: one that serves the host too copies through host memory."""
        return device.type != "cpu" and self._backends.get(device.type) != self._backends.get("cpu")

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, by rank."""
        return all_gather_rows(self._all_gather_row, values, self)

    def _all_gather_row(self, values: Sequence[int]) -> list[list[int]]:
        row = torch.tensor(values, dtype=torch.int64, device=self.wire_device)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        call = partial(dist.all_gather, rows, row, async_op=True)
        self._start(call, row, f"the all-gather of {self.participants}").wait()
        return torch.stack(rows).tolist()

    def start_all_gather_ints(self, values: Sequence[int]) -> PendingInts:
        """An all-reduce of a matrix with one row per rank, of which each rank fills its own; in stream order."""
        own = torch.zeros(self.world_size, len(values), dtype=torch.int64)
        own[self.rank] = torch.tensor(values, dtype=torch.int64)
        if self.wire_device.type == "cpu":
            return ints_on_host(self.start_all_reduce(own))
        # Only from pinned memory is the copy asynchronous: from any other it would block the host.
        rows = own.pin_memory().to(self.wire_device, non_blocking=True)
        return ints_on_device(self.start_all_reduce(rows), self._ints_stream)

    @cached_property
    def _ints_stream(self) -> torch.Stream:
        return torch.Stream(self.wire_device)

    def start_reduce_scatter(self, output: Tensor, memory: Tensor, parts: Sequence[Tensor] | None) -> Transfer:
        """Start summing every rank's `parts` of `memory`, each to its rank's `output`; in stream order.

        `None` means equal parts, in one native call; the list form takes any lengths.
        """
        if parts is None:
            call: Callable[..., Any] = partial(_reduce_scatter, as_real(output), as_real(memory))
        else:
            call = partial(dist.reduce_scatter, as_real(output), list(map(as_real, parts)))
        # The transfer keeps `output` alive. The caller keeps `memory`, which the backend reads until the wait.
        return self._start(partial(call, async_op=True), output, f"the reduce-scatter of {self.participants}")

    def start_all_gather(self, memory: Tensor, parts: Sequence[Tensor] | None) -> Transfer:
        """Start sending every rank's own part of `memory` to all ranks, in stream order; `parts` as above."""
        if parts is None:
            mine = memory.view(self.world_size, -1)[self.rank]
            call: Callable[..., Any] = partial(_all_gather, as_real(memory), as_real(mine))
        else:
            call = partial(dist.all_gather, list(map(as_real, parts)), as_real(parts[self.rank]))
        return self._start(partial(call, async_op=True), memory, f"the all-gather of {self.participants}")

    def start_all_reduce(self, memory: Tensor) -> Transfer:
        """Start summing `memory` over all ranks, in place."""
        call = partial(dist.all_reduce, as_real(memory), async_op=True)
        return self._start(call, memory, f"the all-reduce of {self.participants}")

    def start_send(self, memory: Tensor, to: int, tag: int = TAG_DATA) -> Transfer:
        """Start sending `memory` to one rank."""
        data = as_bytes(memory)
        call = partial(dist.isend, data, group_dst=to, tag=wire_tag(tag, data.numel()))
        return self._start(call, memory, f"sending to {self._name(to)}")

    def start_receive(self, memory: Tensor, source: int, tag: int = TAG_DATA) -> Transfer:
        """Start receiving into `memory` from one rank."""
        data = as_bytes(memory)
        call = partial(dist.irecv, data, group_src=source, tag=wire_tag(tag, data.numel()))
        return self._start(call, memory, f"receiving from {self._name(source)}")

    def start_broadcast(self, memory: Tensor, source: int) -> Transfer:
        """Start overwriting `memory` with that of rank `source`."""
        call = partial(dist.broadcast, as_bytes(memory), group_src=source, async_op=True)
        return self._start(call, memory, f"the broadcast of {self._name(source)}")

    def start_broadcasts(self, memories: Sequence[tuple[Tensor, int]]) -> Sequence[Transfer]:
        """As one operation of the backend if it has such: then all sources send at the same time."""
        device = memories[0][0].device
        backend = self._group._get_backend(device)
        if len(memories) == 1 or not getattr(backend, "supports_coalescing", False):
            return super().start_broadcasts(memories)
        sources = ", ".join(map(self._name, dict.fromkeys(source for _, source in memories)))

        def call(group: dist.ProcessGroup) -> Any:
            try:
                with distributed_c10d._coalescing_manager(group, device, async_ops=True) as together:
                    for memory, source in memories:
                        dist.broadcast(as_bytes(memory), group=group, group_src=source, async_op=True)
            except BaseException:
                # torch leaves the operation open, and would only note the group's later collectives.
                torch_world.pg_coalesce_state.pop(group, None)
                with suppress(Exception):
                    group._end_coalescing(device)
                raise
            return together

        return [self._start(call, memories[0][0], f"the broadcasts of {sources}")]

    def _name(self, rank: int) -> str:
        return f"rank {self.peers[rank]} of {len(self.presence.ranks)}"

    def _start(self, call: Callable[..., Any], memory: Tensor, description: str) -> Transfer:
        return start(partial(call, group=self._group), memory, description, presence=self.presence)

    def abort(self) -> None:
        """End the transfers that an accelerator waits for, if its backend can; the group cannot be used afterwards.

        Whoever waits for the device then goes on with undefined values, so the optimizer must be marked before.
        """
        for device_type in self._backends:
            if self.stream_ordered(torch.device(device_type)):
                backend = self._group._get_backend(torch.device(device_type))
                getattr(backend, "abort", lambda: None)()

    def companion(self) -> CompanionTransport:
        """A transport over a new Gloo group of the same ranks, for host memory; a collective."""
        return connect_companion(self, _timeout(self._group))


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend by device type, for all that the group serves: "cpu:gloo,cuda:nccl" has two."""
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The group's time-out, or `None` for torch's default if no backend reports one."""
    for device_type in _backends(group):
        options = getattr(group._get_backend(torch.device(device_type)), "options", None)
        if options is not None:
            return getattr(options, "_timeout", None)
    return None


# Names in torch 2.13 and later, or before.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
