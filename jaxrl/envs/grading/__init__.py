"""Rewards, and tools, from code that may hang, crash or be anybody's: it runs in worker processes, each call with a deadline.

`WorkerScorer` is what an environment sees of it. `worker` runs in the processes, `process` is one of them seen from here,
`workers` are those of one function, `maths` is a function of ours.
"""
