"""Thin bridges to other libraries' checkpoints and training loops."""
