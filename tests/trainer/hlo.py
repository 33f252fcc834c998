"""Reads what devices say to one another out of a compiled or partitioned program."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from jaxrl.config.trainer import MESH_AXES, MeshConfig

_COLLECTIVE = re.compile(
    r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)(?:-start)?\((.*)"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"replica_groups=(\{(?:\{[\d,]*\},?)*\})")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}")


def collectives(text: str, mesh: MeshConfig) -> Counter[tuple[str, str, str, int]]:
    """Count (kind, mesh axes joined by +, dtype, elements of the result) of every array that a program communicates.

    A collective of several arrays counts as one of each: how many are fused into one is up to the compiler, and differs
    between releases, as do the order of dimensions and the place in the program. What is moved, how, and between whom
    does not.
    """
    found: Counter[tuple[str, str, str, int]] = Counter()
    for line in text.splitlines():
        if match := _COLLECTIVE.search(line):
            result, kind, rest = match.groups()
            for dtype, shape in _ARRAY.findall(re.sub(r"/\*.*?\*/", "", result)):
                found[kind, _axes(rest, mesh), dtype, math.prod(int(n) for n in shape.split(",") if n)] += 1
    return found


def _axes(attributes: str, mesh: MeshConfig) -> str:
    """The mesh axes along which the devices of a group differ."""
    groups = [frozenset(group) for group in _groups(attributes, mesh.num_devices)]
    places = np.stack(np.unravel_index(np.arange(mesh.num_devices), tuple(mesh.shape[axis] for axis in MESH_AXES)), axis=1)
    pairs = [pair for group in groups for pair in itertools.combinations(group, 2)]
    differing = {axis for a, b in pairs for axis in range(len(MESH_AXES)) if places[a][axis] != places[b][axis]}
    return "+".join(axis for i, axis in enumerate(MESH_AXES) if i in differing)


def _groups(attributes: str, num_devices: int) -> Iterator[list[int]]:
    def iota(dims: str | None, order: str | None) -> np.ndarray:
        ids = np.arange(num_devices)
        ids = ids.reshape([int(n) for n in dims.split(",")]) if dims else ids
        return ids.transpose([int(n) for n in order.split(",")]) if order else ids

    if match := _IOTA.search(attributes):
        yield from iota(match[2], match[3]).reshape([int(n) for n in match[1].split(",")]).tolist()
    elif match := _MESH.search(attributes):
        sizes = [int(n) for n in re.findall(r"=(\d+)", match[1])]
        names = re.findall(r"'(\w+)'=", match[1])
        inner = [names.index(name) for name in re.findall(r"'(\w+)'", match[4])]
        outer = [i for i in range(len(names)) if i not in inner]
        size = math.prod(sizes[i] for i in inner)
        yield from iota(match[2], match[3]).reshape(sizes).transpose(outer + inner).reshape(-1, size).tolist()
    elif (match := _LISTS.search(attributes)) and match[1] != "{}":
        yield from ([int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1]))
    else:
        yield list(range(num_devices))
