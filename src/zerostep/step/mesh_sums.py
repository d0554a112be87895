"""Numbers of all gradients where a mesh divides parameters in further dimensions: each element of a model counts once.

Inside the ranks that divide a rank's own tensors every element has one owner. A parameter that a mesh shards has its
other elements on the other ranks of that dimension; one that it replicates has none there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from zerostep.comm.exchange import Exchange
from zerostep.comm.exchange import connect as connect_exchange
from zerostep.comm.transport import Transport, connect
from zerostep.dtensors import mesh_groups, sharding_groups
from zerostep.plan.layout import Fragment
from zerostep.step.norms import combine

Dims = tuple[dist.ProcessGroup, ...]  # the groups over which a parameter's elements are spread


class MeshSums:
    """The dimensions of meshes that divide some parameters, and sums over them.

    Parameters of one *kind* are spread over the same groups; the first kind is spread over none. All ranks of a mesh
    have the same kinds in the same order, because that follows from the placements of the parameters. `counted` are
    global ranks whose numbers are added up elsewhere: a dimension inside them is left out here, and of the copies that
    it has of a parameter, one counts.
    """

    def __init__(self, params: Sequence[Tensor], device: torch.device, counted: Collection[int] = ()) -> None:
        self._device, self._counted = device, set(counted)
        self._kinds: dict[Dims, int] = {(): 0}
        self._kind_of: list[int] = []
        self._silent: set[int] = set()  # parameters of which another rank's copy counts
        self.has_counted = False  # whether some dimension is left out here
        self._transports: dict[dist.ProcessGroup, Transport] = {}
        self._exchanges: dict[dist.ProcessGroup, Exchange] = {}
        self.extend(params)

    def extend(self, params: Sequence[Tensor]) -> None:
        """Go on with further parameters; a collective over the groups of their meshes."""
        for param in params[len(self._kind_of) :]:
            dims = tuple(group for group in sharding_groups(param) if not self._is_counted(group))
            for group in dims:
                self._connect(group)
            self._note_counted(len(self._kind_of), param)
            self._kind_of.append(self._kinds.setdefault(dims, len(self._kinds)))

    def _note_counted(self, index: int, param: Tensor) -> None:
        inside = [group for group in mesh_groups(param) if self._is_counted(group)]
        copies = [group for group in inside if group not in sharding_groups(param)]
        self.has_counted |= bool(inside)
        if any(dist.get_rank(group) for group in copies):
            self._silent.add(index)

    def _is_counted(self, group: dist.ProcessGroup) -> bool:
        return set(dist.get_process_group_ranks(group)) <= self._counted

    def _connect(self, group: dist.ProcessGroup) -> None:
        if group not in self._transports:
            self._transports[group] = connect(group, self._device)
            self._exchanges[group] = connect_exchange(self._transports[group], self._device)

    @property
    def divides(self) -> bool:
        """Whether some parameter is spread over a further dimension, or has copies that do not count."""
        return len(self._kinds) > 1 or bool(self._silent)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received over further dimensions."""
        exchanges = self._exchanges.values()
        return sum(each.bytes_sent for each in exchanges), sum(each.bytes_received for each in exchanges)

    @property
    def transports(self) -> list[Transport]:
        """How to talk to the ranks of each further dimension, in the same order on all ranks."""
        return list(self._transports.values())

    def kind_of(self, param: int) -> int:
        """The kind of a parameter."""
        return self._kind_of[param]

    def runs(self, fragments: Iterable[Fragment]) -> list[tuple[int, list[Fragment]]]:
        """Neighbouring fragments of one kind together, with that kind; without those of which another copy counts."""
        runs = groupby(fragments, key=lambda each: (self._kind_of[each.param], each.param in self._silent))
        return [(kind, list(run)) for (kind, silent), run in runs if not silent]

    @property
    def count(self) -> int:
        """Number of kinds."""
        return len(self._kinds)

    def add_up(self, sums: Tensor, kinds: Sequence[int], norm_type: float) -> Tensor:
        """Contributions to norms, one of each of some kinds, together with those of the other ranks of each kind."""
        for dims, kind in self._kinds.items():
            chosen = [position for position, each in enumerate(kinds) if each == kind] if dims else []
            for group in dims if chosen else ():
                sums[chosen] = combine(self._exchanges[group], sums[chosen], norm_type)
        return sums
