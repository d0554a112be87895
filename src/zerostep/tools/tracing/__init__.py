"""One training step of every rank as a picture: compute, communication per bucket, and time the host waited.

`collect` starts a script with a `worker` on each rank, `events` reads the profiles, `step` evaluates one step with the
arithmetic of `intervals`, and `picture` and `chrome` write the result. It imports nothing else of zerostep but the
errors of `tools`. Read `step` first.
"""
