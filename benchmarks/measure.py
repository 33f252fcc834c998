"""What every benchmark shares: interleaved timing, peers in another Python, the machine's state, a table and a JSON file.

In: callables with the amount of work that one call does. Out: rates with their spread, beside the load and the versions they were
measured with. Cases are timed in turn (a, b, a, b, ...), so that a disturbance of a shared machine meets all of them and ratios within
one run can be trusted more than the rates. It knows nothing of models, and decides nothing: a benchmark is not a test.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
"""Where JSON goes unless told otherwise; not committed: what is worth keeping is in docs/results/performance.md."""
PEER_PYTHON_VAR = "PEER_PYTHON"
"""Environment variable with the Python (with torch and transformers) that runs the peers; without it they are left out, and said so."""


@dataclass(frozen=True)
class Case:
    """Something to time."""

    name: str
    run: Callable[[], object]
    """One repetition; must not return before its work is done. A float that it returns is taken as its seconds."""
    work: float
    """Amount of work of one repetition, in `unit`."""
    unit: str
    """What is counted, such as `tokens` or `GFLOP`; the rate is per second."""


@dataclass
class Figure:
    """A rate, with every repetition kept."""

    name: str
    unit: str
    rates: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The middle rate."""
        return statistics.median(self.rates)

    def as_json(self) -> dict[str, Any]:
        """The figure as a JSON object."""
        spread = {"median": self.median, "min": min(self.rates), "max": max(self.rates), "n": len(self.rates)}
        return {"unit": f"{self.unit}/s", **spread, "seconds": self.seconds}


def interleave(cases: Sequence[Case], *, repeats: int, warm_ups: int = 1, say: Callable[[str], None] = lambda _: None) -> dict[str, Figure]:
    """Time every case `repeats` times, in turn, after `warm_ups` untimed rounds.

    Returns:
      Figures by name of the case.
    """
    figures = {case.name: Figure(case.name, case.unit) for case in cases}
    for round_index in range(-warm_ups, repeats):
        for case in cases:
            say(f"{'warm-up' if round_index < 0 else f'round {round_index + 1}/{repeats}'}: {case.name}")
            started = time.perf_counter()
            told = case.run()
            taken = told if isinstance(told, float) else time.perf_counter() - started
            if round_index >= 0:
                figures[case.name].rates.append(case.work / taken)
                figures[case.name].seconds.append(taken)
    return figures


class Peer:
    """A program of another system, in another Python, driven line by line so that its repetitions interleave with ours.

    The program prints one JSON object when it is ready, then one for each JSON line that it reads, and ends at the end of its input.
    """

    def __init__(self, script: Path, *arguments: str, python: str) -> None:
        self._process = subprocess.Popen(
            [python, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.hello: dict[str, Any] = self._read()
        """What the program said when it was ready: its versions, for one."""

    def call(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        return self._read()

    def close(self) -> None:
        """End the program."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer {self._process.args} ended with code {self._process.wait()}; its own output is above")
        return json.loads(line)


def peer_python() -> str | None:
    """The Python that runs peers, from `PEER_PYTHON`; None leaves them out."""
    return os.environ.get(PEER_PYTHON_VAR) or None


def describe_machine(packages: Sequence[str] = ("jax", "jaxlib", "numpy")) -> dict[str, Any]:
    """CPU, cores, load averages, versions and commit at this moment; no host name, no user name."""
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    return {
        "cpu": cpu,
        "num_cpus": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": sys.version.split()[0],
        "versions": {name: metadata.version(name) for name in packages},
        "commit": _commit(),
    }


class Report:
    """Figures and ratios of one benchmark, printed as tables and written as JSON."""

    def __init__(self, name: str, *, settings: Mapping[str, Any], packages: Sequence[str] = ("jax", "jaxlib", "numpy")) -> None:
        self.name = name
        self.settings = dict(settings)
        self.machine_before = describe_machine(packages)
        self.figures: dict[str, Figure] = {}
        self.ratios: dict[str, float] = {}
        self.notes: list[str] = []

    def ratio(self, name: str, numerator: str, denominator: str) -> None:
        """Add the median over rounds of one figure's rate divided by another's: both were timed in the same round."""
        pairs = zip(self.figures[numerator].rates, self.figures[denominator].rates, strict=True)
        self.ratios[name] = statistics.median(a / b for a, b in pairs)

    def publish(self, output: Path | None = None) -> Path:
        """Print the tables and write the JSON file; return where it is."""
        console = Console()
        table = Table(title=f"{self.name}, load before {self.machine_before['load_1min']}, after {describe_machine(())['load_1min']}")
        for column in ("figure", "median", "min", "max", "n", "unit"):
            table.add_column(column, justify="left" if column in ("figure", "unit") else "right")
        for figure in self.figures.values():
            values = (figure.median, min(figure.rates), max(figure.rates))
            shown = (f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in values)
            table.add_row(figure.name, *shown, str(len(figure.rates)), f"{figure.unit}/s")
        console.print(table)
        for name, value in self.ratios.items():
            console.print(f"  {name}: {value:.3f}", highlight=False)
        for note in self.notes:
            console.print(f"  {note}", highlight=False)
        path = output or RESULTS / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "benchmark": self.name,
            "settings": self.settings,
            "machine": self.machine_before,
            "load_after": describe_machine(())["load_1min"],
            "figures": {name: figure.as_json() for name, figure in self.figures.items()},
            "ratios": self.ratios,
            "notes": self.notes,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")
        console.print(f"  written to {path}", highlight=False, soft_wrap=True)
        return path


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _commit() -> str | None:
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
