"""All ranks that hold a part of one model: those that divide its tensors, and those that hold their other blocks.

An optimizer knows the ranks of its own process group. With tensor parallelism other groups hold other blocks of the
same parameters, and a save or a load is one of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch.distributed as dist
from torch import Tensor

from zerostep.comm.transport import Transport, connect, control_of
from zerostep.dtensors import mesh_groups

_BITS = 62  # of an integer that is sent


class ModelRanks:
    """Finds the ranks that hold a part of the model of one optimizer, and connects them when they are first needed."""

    def __init__(self, control: Transport) -> None:
        self._control = control
        self._groups: list[dist.ProcessGroup] = []
        self._transport = control

    def transport(self, params: Iterable[Tensor]) -> Transport:
        """A transport for control traffic between all these ranks: that of the optimizer itself without DTensors.

        A collective when the meshes of the parameters are others than at the last call, the same on all these ranks.
        """
        groups = _distinct(chain.from_iterable(mesh_groups(param) for param in params))
        if groups != self._groups:
            self._transport, self._groups = self._connected(groups), groups
        return self._transport

    def _connected(self, groups: Sequence[dist.ProcessGroup]) -> Transport:
        own = tuple(self._control.presence.ranks) if self._control.world_size > 1 else (dist.get_rank(),)
        near = [control_of(connect(group)) for group in groups]
        ranks = _closure(
            {*own, *chain.from_iterable(map(dist.get_process_group_ranks, groups))}, [self._control, *near]
        )
        if set(ranks) == set(own):
            return self._control
        # Only the ranks that it consists of make this group, so ranks that train something else need not know of it.
        everywhere = len(ranks) == dist.get_world_size()
        group = None if everywhere else dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return control_of(connect(group))


def _distinct(groups: Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Each group once, in the order in which the parameters name them: the same on all ranks of a group."""
    return list({id(group): group for group in groups}.values())


def _closure(known: set[int], near: Sequence[Transport]) -> list[int]:
    """All ranks that are linked by groups, from what each rank knows; a collective in each of the groups.

    In each round every rank tells its neighbours all ranks that it knew before the round. Who learns nothing new in a
    round knows all; let the first such round of any rank be number `n`. That it was this one reaches every rank within
    `n` further rounds, so all ranks stop after round `2 * n`.
    """
    first = round_number = 0
    while not first or round_number < 2 * first:
        round_number += 1
        found, firsts = set(known), {first}
        for transport in near:
            for row in transport.all_gather_ints([first, *_to_bits(known)]):
                firsts.add(row[0])
                found |= _from_bits(row[1:])
        if found == known:
            firsts.add(round_number)
        known, first = found, min(firsts - {0}, default=0)
    return sorted(known)


def _to_bits(ranks: set[int]) -> list[int]:
    words = [0] * -(-dist.get_world_size() // _BITS)
    for rank in ranks:
        words[rank // _BITS] |= 1 << rank % _BITS
    return words


def _from_bits(words: Sequence[int]) -> set[int]:
    return {at * _BITS + bit for at, word in enumerate(words) for bit in range(_BITS) if word >> bit & 1}
