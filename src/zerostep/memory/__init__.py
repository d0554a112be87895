"""Where parameters lie: flat memory for a bucket, the part that this rank owns, and the leaves that optimizers hold.

Imports `plan` for layouts, and from `comm` only the protocols of a transport's messages; nothing here communicates.
Read `bucket_memory` first (a bucket as messages), then `shard` (one bucket of the sharded optimizer) and `leaf`.
"""
