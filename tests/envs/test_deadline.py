"""The clock of a rollout's deadline stands still while the rollout waits its turn."""

import asyncio

import pytest

from jaxrl.envs.deadline import rollout_deadline, waiting_its_turn


async def test_a_wait_moves_the_deadline_by_as_long_as_it_took() -> None:
    clock = asyncio.get_running_loop().time
    async with asyncio.timeout(0.1) as deadline:
        with rollout_deadline(deadline):
            first = deadline.when()
            started = clock()
            with waiting_its_turn():
                assert deadline.when() is None
                await asyncio.sleep(0.2)
            later = deadline.when()
            assert first is not None and later is not None
            assert later - first == pytest.approx(clock() - started, abs=0.05)


async def test_after_the_wait_the_rest_of_the_time_is_all_that_is_left() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05) as deadline:
            with rollout_deadline(deadline):
                with waiting_its_turn():
                    await asyncio.sleep(0.06)
                await asyncio.sleep(60)


async def test_without_a_deadline_a_wait_is_a_wait_and_an_exception_passes_through_it() -> None:
    with pytest.raises(KeyError), waiting_its_turn():
        raise KeyError
    async with asyncio.timeout(None) as deadline:
        with rollout_deadline(deadline), waiting_its_turn():
            pass
        assert deadline.when() is None
