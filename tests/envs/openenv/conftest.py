"""Leaves out what needs the package `openenv`: a server that `test_real_server.py` starts in an environment of its own."""

collect_ignore = ["guessing_server.py"]
