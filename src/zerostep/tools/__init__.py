"""The command line and what stands behind each command; needs the extra `cli`.

It may import every other package of zerostep; none of them imports it. Read `cli` first, then `commands`, whose modules
parse options and print. The work is done in `planner` (zerostep plan), `tracing` (zerostep trace) and `demo` (zerostep
demo); inspect and convert call `zerostep.checkpoint`.
"""
