"""Questions from any dataset of the `reasoning_gym` package, in tiers, with a held-out split, and what a reply to one is worth.

In: a dataset's name, its parameters, tiers of them, seeds. Out: specs that hold the question, the answer and the tier
(`difficulty`), and a scorer; what is played with them is the environments' business. Membership in `train` or `heldout` is a
hash of the question text, so it does not depend on seeds or sizes. The package is imported only when questions are made.

Note: item i of a dataset is generated from seed + i, so equal questions and overlapping seeds are normal: texts are
de-duplicated here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxrl.config.env import GymQuestionsConfig, TierConfig, env_name
from jaxrl.config.reward import PythonRewardConfig
from jaxrl.envs.answers import exact_match, extract_answer
from jaxrl.envs.base import Message, Score, TaskSpec, opening
from jaxrl.envs.grading.scorer import WorkerScorer
from jaxrl.envs.splits import question_id, split_in_words, split_of
from jaxrl.errors import ConfigError

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

logger = logging.getLogger(__name__)

FEW_QUESTIONS = 30
"""Of fewer than these, if more were asked for than twice as many as there are, it is warned."""
_OWNED = {"seed": "seed", "size": "num_tasks"}
"""Dataset parameters that the environment sets itself, and the config key that sets them."""


@dataclass(frozen=True, slots=True)
class GymQuestions:
    """The questions of one environment, and what scores a reply to one."""

    specs: list[TaskSpec]
    """The tasks; not empty. Those that `examples` ask are left out."""
    opening: list[Message]
    """What comes before a question: the system message and the examples."""
    items: dict[str, dict[str, Any]]
    """What the dataset made for each task, by the task's id."""
    score: Score
    """What a reply is worth, as `scorer` says."""
    close: Callable[[], None]
    """Gives back what `score` holds."""
    require_stop: bool
    """A reply that the token limit cut is worth 0 without asking `score`."""


def gym_questions(config: GymQuestionsConfig) -> GymQuestions:
    """Generate the questions of every tier, and keep those of the split.

    Raises:
      ConfigError: the package is missing, the dataset or a parameter is unknown or illegal, the split is empty, or
        replies are compared with the answer of a dataset that has no single one.
    """
    datasets = _datasets(config)
    if len(datasets) < len(config.tiers):
        raise ConfigError(f"env {env_name(config)!r}: two `tiers` have one name: {[tier.name for tier in config.tiers]}")
    items: dict[str, dict[str, Any]] = {}
    specs: list[TaskSpec] = []
    num_distinct = 0
    for tier, item in _distinct_items(config, datasets):
        num_distinct += 1
        if config.split in ("all", split_of(item["question"], config.heldout_frac)):
            identity = f"{tier}/{question_id(item['question'])}"
            answer = item["answer"] if isinstance(item["answer"], str) else None
            items[identity] = item
            specs.append({"id": identity, "question": item["question"], "answer": answer, "difficulty": tier})
    if not specs:
        raise ConfigError(
            f"env {env_name(config)!r}: no question of dataset {config.dataset!r} is in split {config.split!r} with "
            f"`num_tasks`={config.num_tasks} and `heldout_frac`={config.heldout_frac}; raise one of them"
        )
    _tell_split(config, len(specs), num_distinct, len(datasets))
    shown = {example.question for example in config.examples}
    if not (kept := [spec for spec in specs if spec["question"] not in shown]):
        raise ConfigError(f"env {env_name(config)!r}: each of its {len(specs)} tasks is one of `examples`; leave some of those out")
    before = opening(config.system_prompt, config.examples)
    if config.scorer == "exact_match":
        return GymQuestions(kept, before, items, exact_match, lambda: None, config.require_stop)
    settings = config.model_dump_json(include=set(GymQuestionsConfig.model_fields))
    scorer = WorkerScorer(config, f"{__name__}:dataset_score", {"config": settings})

    async def score(spec: TaskSpec, text: str) -> float | None:
        return await scorer.score({"tier": spec["difficulty"], "item": items[spec["id"]]}, text)

    return GymQuestions(kept, before, items, score, scorer.close, require_stop=False)


def _tell_split(config: GymQuestionsConfig, num_kept: int, num_distinct: int, num_tiers: int) -> None:
    """Say what is left of the items that were asked for; a warning where that is little."""
    asked = config.num_tasks * num_tiers
    few = num_kept < FEW_QUESTIONS and 2 * num_kept < asked
    logger.log(
        logging.WARNING if few else logging.INFO,
        "env %r: %s, out of %d items (`num_tasks`=%d%s), of which %d ask what another one asks%s",
        env_name(config),
        split_in_words(num_kept, num_distinct, config.split, config.heldout_frac),
        asked,
        config.num_tasks,
        f" in each of {num_tiers} tiers" if num_tiers > 1 else "",
        asked - num_distinct,
        "; raise `num_tasks` for more" if few else "",
    )


def dataset_score(spec: TaskSpec, text: str, *, config: str) -> float:
    """Ask the dataset what a reply is worth; called in worker processes, since some datasets evaluate the reply as an expression.

    The item comes along and is not generated again: with some datasets, that gives another item in another process.

    Args:
      spec: the item and its tier.
      text: the reply.
      config: a `GymQuestionsConfig` as JSON.

    Note: many datasets give part credit to any reply that holds the answer, also to a wrong number.
    """
    return _datasets_in(config)[spec["tier"]].score_answer(extract_answer(text), spec["item"])


@functools.cache
def _datasets_in(config: str) -> dict[str, ProceduralDataset]:
    return _datasets(GymQuestionsConfig.model_validate_json(config))


def _datasets(config: GymQuestionsConfig) -> dict[str, ProceduralDataset]:
    """Return the dataset of each tier."""
    return {tier.name: _dataset(config, tier) for tier in config.tiers or [TierConfig(name="all")]}


def _distinct_items(config: GymQuestionsConfig, datasets: dict[str, ProceduralDataset]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield (tier, item) once per distinct question text; where tiers share one, the first tier has it."""
    seen = set()
    needs_answer = config.scorer == "exact_match" and not isinstance(config.reward, PythonRewardConfig)
    for tier, dataset in datasets.items():
        where = f"env {env_name(config)!r}, tier {tier!r}: dataset {config.dataset!r}"
        for index in range(config.num_tasks):
            try:
                item = dataset[index]
            except Exception as error:  # whatever the parameters provoke in somebody else's generator
                raise ConfigError(f"{where} failed to make item {index}: {type(error).__name__}: {error}") from error
            if needs_answer and not isinstance(item["answer"], str):
                raise ConfigError(
                    f"{where} has no single answer to compare with (item {index} has {item['answer']!r}); use `scorer`='dataset'"
                )
            if item["question"] not in seen:
                seen.add(item["question"])
                yield tier, item


def _dataset(config: GymQuestionsConfig, tier: TierConfig) -> ProceduralDataset:
    where = f"env {env_name(config)!r}, tier {tier.name!r}"
    registry = _registry()
    if config.dataset not in registry:
        nearest = _nearest(config.dataset, registry)
        raise ConfigError(f"env {env_name(config)!r}: `dataset`={config.dataset!r} is not in reasoning_gym{nearest}")
    dataset_class, config_class = registry[config.dataset]
    parameters = config.parameters | tier.parameters
    legal = {field.name for field in dataclasses.fields(config_class) if field.init} - set(_OWNED)
    for name in parameters:
        if name in _OWNED:
            raise ConfigError(f"{where}: the dataset parameter {name!r} is set by the environment's own `{_OWNED[name]}`; set that instead")
        if name not in legal:
            raise ConfigError(f"{where}: dataset {config.dataset!r} has no parameter {name!r}{_nearest(name, legal)}")
    try:
        return dataset_class(config=config_class(**parameters, seed=config.seed, size=config.num_tasks))
    except Exception as error:  # configs refuse with asserts, and trip over values of a wrong type in their own ways
        raise ConfigError(
            f"{where}: dataset {config.dataset!r} refuses the parameters {parameters!r}: {type(error).__name__}: {error}"
        ) from error


def _registry() -> dict[str, tuple[Callable[..., ProceduralDataset], type[Any]]]:
    try:
        # Its dependency cellpylib compares with literals by `is`, which Python remarks on when it first compiles the
        # file.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"questions of a `dataset` need the package `reasoning-gym`, which cannot be imported ({error}); "
            "install it with `pip install reasoning-gym`"
        ) from error
    return DATASETS


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=3)
    return f"; did you mean {' or '.join(repr(word) for word in close)}?" if close else f"; known: {sorted(known)}"
