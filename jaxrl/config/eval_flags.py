"""The flags of `jaxrl eval`: their names, what each takes, and what help says.

In: a command line without the `--env.KEY` and `--inference.KEY` overrides. Out: a namespace of typed values. What flags mean together is
the business of the command.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl.config.eval_command import SPEC_KINDS

_DESCRIPTION = """\
Measure a model on the tasks of an environment: each is played, scored and
written down, and the scores come with their standard error."""
_EPILOG = """\
ENV_SPEC:
{specs}
  {config:<38} an environment of a run (its folder or
                                         a config file), as the run has it
  reasoning_gym:chain_sum@tiers          ten difficulties, 2x1 to 7x5
  reasoning_gym:chain_sum@2x1,3x1        some of them (terms x digits)

Any setting of the environment is a flag: --env.num_tasks 100, --env.seed 7,
--env.parameters.min_terms 3, --env.scorer dataset; values are JSON or TOML,
else text. --inference.KEY sets the engine of a checkpoint likewise.

Exit codes: 0 ok, 1 failed or nothing was scored, 2 usage or configuration,
3 not reproducible (with --require-reproducible), 4 regression (with
--fail-on-regression or --regression-p), 5 a server cannot be reached.

Examples:
  jaxrl eval config:runs/a#chain_sum_heldout --checkpoint runs/a \\
    --compare runs/a/evals/step_000000.chain_sum_heldout.json
  jaxrl eval reasoning_gym:chain_sum@tiers --limit 100 \\
    --llm-endpoint http://127.0.0.1:8000/v1 --model smollm2
  jaxrl eval openenv:http://127.0.0.1:8765 --checkpoint models/mine \\
    --compare evals/before/result.json --fail-on-regression
"""


def build_eval_parser() -> argparse.ArgumentParser:
    """Return the parser of everything but overrides."""
    specs = "\n".join(f"  {word}:{kind.example}" for word, kind in SPEC_KINDS.items())
    epilog = _EPILOG.format(specs=specs, config="config:RUN_DIR#ENV_NAME")
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.eval",
        description=_DESCRIPTION,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s ENV_SPEC (--llm-endpoint URL --model NAME |\n"
        "                            --checkpoint DIR) [options] [--env.KEY VALUE ...]",
    )
    parser.add_argument("spec", metavar="ENV_SPEC", help="what is played; see below")
    _add_policy(parser.add_argument_group("who is measured"))
    _add_tasks(parser.add_argument_group("what is played"))
    _add_sampling(parser.add_argument_group("how tokens are sampled"))
    _add_outcome(parser.add_argument_group("what comes of it"))
    return parser


def parse_eval_flags(argv: Sequence[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse a command line without overrides; a flag that nobody knows names the nearest.

    Raises:
      SystemExit: with code 2 on a usage error, with code 0 after `--help`.
    """
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        name = next((token for token in unknown if token.startswith("--")), unknown[0]).partition("=")[0]
        known = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(name, known, n=1)
        setting = f"--env.{name.removeprefix('--').replace('-', '_')}"
        hint = f"did you mean `{near[0]}`?" if near else f"a setting of the environment is given as `{setting}`"
        parser.error(f"unknown flag {name}; {hint}" if name.startswith("--") else f"unexpected argument {name!r}; one ENV_SPEC is played")
    return flags


def _add_policy(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--llm-endpoint", metavar="URL", help="an OpenAI-compatible server, such as http://127.0.0.1:8000/v1")
    group.add_argument("--model", metavar="NAME", help="what that server calls the model; of a checkpoint, its name in the result")
    group.add_argument("--api-key-var", metavar="VAR", help="the environment variable that holds that server's key")
    group.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="a Hugging Face directory, a run's folder (its newest checkpoint) or its checkpoints/step_NNNNNN, in an engine of its own",
    )
    group.add_argument("--num-slots", type=_whole(1), metavar="N", help="engine: sequences that decode at the same time (32, or the run's)")
    group.add_argument("--max-model-len", type=_whole(2), metavar="N", help="engine: prompt plus reply tokens (512, or the run's)")
    group.add_argument("--dtype", choices=["float32", "bfloat16"], help="engine: precision of the weights (float32, or the run's)")


def _add_tasks(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", metavar="URL", help="of an OpenEnv server, if ENV_SPEC is `openenv` alone")
    group.add_argument(
        "--env-name", metavar="NAME", help="which environment of an OpenEnv server; of any other kind, its name in the result"
    )
    group.add_argument(
        "--split",
        metavar="NAME",
        help="of an OpenEnv server its own (test); of our questions train, heldout or all (heldout; a file's: all), where test is heldout",
    )
    group.add_argument("--limit", type=_whole(1), metavar="N", help="play the first N tasks, of several difficulties in turn")
    group.add_argument("--seeds", type=_seeds, metavar="0,1", help="play each task once per seed, in environments that read one")
    group.add_argument("--samples-per-task", type=_whole(1), metavar="N", help="episodes per task and seed (1)")
    group.add_argument("--max-turns", type=_whole(1), metavar="N", help="replies per episode, in environments of several turns")
    group.add_argument("--success-threshold", type=_number(), metavar="X", help="an episode with at least this reward is a success (1.0)")
    group.add_argument("--system-prompt", metavar="TEXT", help="a system message before the question")
    group.add_argument(
        "--concurrency", type=_whole(1), metavar="N", help="episodes at the same time (16; of a checkpoint, twice the slots)"
    )
    group.add_argument("--deadline", type=_number(least=1e-3), metavar="S", help="seconds for one episode; a later one is an error (300)")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperature", type=_number(least=0), metavar="X", help="0, the default, takes the likeliest token")
    group.add_argument("--top-p", type=_number(least=0), metavar="X", help="nucleus sampling (1: off)")
    group.add_argument("--max-tokens", type=_whole(1), metavar="N", help="tokens of one reply (256)")
    group.add_argument("--run-seed", type=_whole(0), metavar="N", help="seed of all sampling (0, or that of the run that ENV_SPEC names)")


def _add_outcome(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-dir", "-o", type=Path, metavar="DIR", help="for result.json, episodes.jsonl, timings.jsonl (evals/<env>-<model>)"
    )
    group.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="play only what the folder lacks, the default; --no-resume sets what is there aside and plays all anew",
    )
    group.add_argument("--compare", type=Path, metavar="RESULT.json", help="list the tasks fixed and regressed since an earlier result")
    group.add_argument("--force", action="store_true", help="compare results of different tasks or thresholds all the same")
    group.add_argument("--fail-on-regression", action="store_true", help="exit with 4 if a task regressed (with --compare)")
    group.add_argument(
        "--regression-p",
        type=_number(least=0),
        metavar="P",
        help="exit with 4 only if the success rate fell and the exact McNemar p is below P, such as 0.05 (with --compare)",
    )
    group.add_argument("--require-reproducible", action="store_true", help="exit with 3 unless equal seeds gave equal first observations")
    group.add_argument("--probe-policy", action="store_true", help="also play one task twice at temperature 0 and compare the replies")
    group.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else on standard output")


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    return parse


def _number(least: float = -math.inf) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least:
            raise argparse.ArgumentTypeError(f"expected a number{'' if least == -math.inf else f' of at least {least:g}'}, got {text!r}")
        return value

    return parse


def _seeds(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas between them, such as 0,1, got {text!r}")
    return tuple(int(part) for part in parts)
