"""Publication: copies that survive donation, two versions kept, versions that only grow."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.errors import EngineError
from jaxrl.weights import WeightStore
from tests.engine.tiny import MODEL, SPEC, WINDOW, decode_params, finish, full_logprobs, generate, make_engine, make_request, trainer_params


@partial(jax.jit, donate_argnums=0)
def train_step(params: dict[str, Any], token_ids_1T: jax.Array) -> dict[str, Any]:
    """Make one gradient step on a sequence and give up the old parameters' memory."""

    def loss(params: dict[str, Any]) -> jax.Array:
        positions = jnp.arange(token_ids_1T.shape[1])[None]
        hidden = MODEL.hidden(params, token_ids_1T, positions, jnp.ones_like(token_ids_1T))
        logprobs = jax.nn.log_softmax(hidden[0] @ MODEL.head(params).T)
        return -jnp.take_along_axis(logprobs[:-1], token_ids_1T[0, 1:, None], axis=1).mean()

    return jax.tree.map(lambda x, g: x - 0.5 * g, params, jax.grad(loss)(params))


def test_the_engine_decodes_on_one_version_while_the_trainer_makes_two_more() -> None:
    request = make_request(prompt=(3, 14, 15, 9), max_tokens=12, seed=1)
    (undisturbed,) = generate(make_engine(seed=0), request)
    store = WeightStore(SPEC, "float32")
    params = jax.tree.map(jnp.copy, trainer_params(0))
    store.publish(0, params)
    engine = make_engine(seed=1)
    engine.load(store.get(0), version=0)
    future = engine.submit(request)
    tokens = jnp.asarray(np.arange(WINDOW)[None] % SPEC.vocab_size)
    for version in (1, 2):
        engine.tick()
        given_up = params
        params = train_step(params, tokens)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given_up))
        engine.tick()
        store.publish(version, params)
        engine.tick()
    finish(engine)
    assert future.result(timeout=0).token_ids.tolist() == undisturbed.token_ids.tolist()
    assert future.result(timeout=0).logprobs.tobytes() == undisturbed.logprobs.tobytes()
    assert future.result(timeout=0).versions.tolist() == [0] * 12
    train_step(params, tokens)
    engine.load(store.get(2), version=2)
    (later,) = generate(engine, request)
    assert later.logprobs.tobytes() != undisturbed.logprobs.tobytes()


def test_only_the_newest_two_versions_are_kept() -> None:
    store = WeightStore(SPEC, "float32")
    assert store.newest is None
    for version in (0, 1, 5):
        store.publish(version, trainer_params(version % 2))
    assert store.newest == 5
    np.testing.assert_array_equal(store.get(1).embed_VD, decode_params(1).embed_VD)
    with pytest.raises(EngineError, match=r"version 0 is not in memory; the store holds \[1, 5\]"):
        store.get(0)


def test_versions_only_grow() -> None:
    store = WeightStore(SPEC, "float32")
    store.publish(3, trainer_params())
    for version in (3, 2):
        with pytest.raises(EngineError, match=f"version {version} was published after version 3"):
            store.publish(version, trainer_params())


def test_parameters_sharded_over_a_mesh_are_gathered_on_one_device() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "fsdp"))

    def shard(x: jax.Array) -> jax.Array:
        spec = sharding if x.ndim > 1 and x.shape[1] % 4 == 0 else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.device_put(x, spec)

    device = jax.devices()[3]
    store = WeightStore(SPEC, "float32", device=device)
    store.publish(0, jax.tree.map(shard, trainer_params()))
    for published, expected in zip(jax.tree.leaves(store.get(0)), jax.tree.leaves(decode_params()), strict=True):
        assert published.devices() == {device}
        np.testing.assert_array_equal(published, expected)


def test_a_published_version_scores_like_the_trainers_forward_pass() -> None:
    store = WeightStore(SPEC, "float32")
    store.publish(4, trainer_params(1))
    engine = make_engine()
    engine.load(store.get(4), version=4)
    tokens = np.array([4, 8, 15, 16, 23, 42])
    future = engine.score(tokens, 0.6)
    finish(engine)
    np.testing.assert_allclose(future.result(timeout=0), full_logprobs(tokens, 0.6, seed=1), rtol=0, atol=1e-5)
