"""Checkpoints: directories of files, and state dicts in `torch.optim`'s own format.

Files: `manifest`, `tensor_file`, `directory` know what is on disk; `saving`, `pending`, `loading` and `weights` bring
it there and back; `reading`, `stored`, `export`, `convert`, `pt_file` and `single_file` work offline.

State: `subject` is what an optimizer offers; `shares` is its state taken apart and put together again; `leaf_states`
does that for leaves, `fragments` and `state_dicts` for a state dict that one rank gathers, `restore` for one that is
loaded.
"""
