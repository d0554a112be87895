"""Communication between ranks: transports, the exchange of buckets, nested values, and agreement before acting.

Imports plan, tensors, errors and version alone. Read transport/ first, which alone calls the network; then exchange.py
(gradients to owners, parameters to all ranks), stream.py and objects.py (tensors and nested values of any size) and
agreement.py (all ranks raise, or none). In every module all ranks must make the same calls in the same order.
"""
