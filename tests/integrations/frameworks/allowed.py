"""How far training with a sharded optimizer may be from the plain framework; docs/frameworks.md has the same."""

NORMS = 1e-6  # norms of gradients in shards are summed in another order
ORDER = 1e-6  # from three ranks on, gradients are summed in another order than DDP's
HOOK = 1e-6  # DDP multiplies by 1/3, its communication hook divides by 3

_MORE = {("sharded", "clip"): NORMS, ("sharded", "three"): ORDER, ("overlap", "three"): HOOK}


def allowed(kind: str, feature: str) -> float:
    """The largest difference of any weight, for a kind of optimizer: `sharded`, `zero` or `overlap`."""
    return _MORE.get((kind, feature), 0.0)
