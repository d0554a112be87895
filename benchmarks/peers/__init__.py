"""One adapter per way to train: plain DDP, other sharded optimizers, and ours, all behind one protocol."""
