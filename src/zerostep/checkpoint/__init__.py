"""Optimizer state in and out of a sharded optimizer, in torch.optim's own format."""
