"""Tasksets of the `verifiers` package as environments, played by its own harnesses as they are.

`environment` is the adapter, `package` alone imports verifiers, `verdicts` reads what its episodes came to, and `loops` is the thread in
which it runs. Imports are absolute: here `verifiers` is always the package.
"""
