"""All ranks that hold a part of one model: those that divide its tensors, and those that hold their other blocks.

An optimizer knows the ranks of its own process group. With tensor parallelism other groups hold other blocks of the
same parameters, and a save or a load is one of all of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from itertools import chain

import torch.distributed as dist
from torch import Tensor

from zerostep.comm.transport import CompanionTransport, Transport, connect, connect_ranks, control_of
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
        # An error closes the connections on every rank: all of them connect anew in their next call.
        failed = isinstance(self._transport, CompanionTransport) and self._transport.failed
        if groups != self._groups or failed:
            self._transport, self._groups = self._connected(groups), groups
        return self._transport

    def _connected(self, groups: Sequence[dist.ProcessGroup]) -> Transport:
        own = tuple(self._control.presence.ranks) if self._control.world_size > 1 else (dist.get_rank(),)
        near = [control_of(connect(group)) for group in groups]
        known = {*own, *chain.from_iterable(map(dist.get_process_group_ranks, groups))}
        ranks, token = _closure(known, [self._control, *near])
        if set(ranks) == set(own):
            return self._control
        return connect_ranks(ranks, token)


def _distinct(groups: Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """Each group once, in the order in which the parameters name them: the same on all ranks of a group."""
    return list({id(group): group for group in groups}.values())


def _closure(known: set[int], near: Sequence[Transport]) -> tuple[list[int], int]:
    """All ranks that are linked by groups, and a token that the first of them draws; a collective in each group.

    In each round every rank tells its neighbours all ranks that it knew before the round. Who learns nothing new in a
    round knows all; let the first such round of any rank be number `n`. That it was this one reaches every rank within
    `n` further rounds, so all ranks stop after round `2 * n`.
    """
    first = round_number = 0
    drawn = (dist.get_rank(), secrets.randbits(_BITS))
    while not first or round_number < 2 * first:
        round_number += 1
        found, firsts, tokens = set(known), {first}, {drawn}
        for transport in near:
            for row in transport.all_gather_ints([first, *drawn, *_to_bits(known)]):
                firsts.add(row[0])
                tokens.add((row[1], row[2]))
                found |= _from_bits(row[3:])
        if found == known:
            firsts.add(round_number)
        known, first, drawn = found, min(firsts - {0}, default=0), min(tokens)
    return sorted(known), drawn[1]


def _to_bits(ranks: set[int]) -> list[int]:
    words = [0] * -(-dist.get_world_size() // _BITS)
    for rank in ranks:
        words[rank // _BITS] |= 1 << rank % _BITS
    return words


def _from_bits(words: Sequence[int]) -> set[int]:
    return {at * _BITS + bit for at, word in enumerate(words) for bit in range(_BITS) if word >> bit & 1}
