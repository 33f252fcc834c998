"""The scripts here import torch, which the tests do without."""

collect_ignore_glob = ["make_*.py"]
