"""Checkpoints on disk: a directory with a manifest and one file of tensors per rank.

May import everything but integrations and tools. Read `manifest` first, then `save` and `load`. `tensor_file` and
`directory` define the files; `weights` handles the model; `reader`, `stored_tensor`, `export`, `reshard`, `pt_file` and
`single_file` work offline, without a process group. The format is described in docs/checkpoint-format.md.
"""
