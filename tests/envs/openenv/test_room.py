"""Whose turn it is to open a session, and how a server's room is learnt."""

import asyncio

import pytest

from jaxrl.envs.openenv import room as rooms
from jaxrl.envs.openenv.room import Room


class Crowd:
    """Rollouts of one room on a server that has so many places; each holds its place until it is told to leave."""

    def __init__(self, room: Room, places: int) -> None:
        self.room, self.places = room, places
        self.inside: list[int] = []
        self.knocks = 0
        self._leaving: dict[int, asyncio.Event] = {}

    async def visit(self, number: int) -> None:
        """Go in as soon as there is a place, and stay until `send_out`."""
        again = False
        while True:
            await self.room.enter(again=again)
            self.knocks += 1
            await asyncio.sleep(0)
            if len(self.inside) < self.places:
                break
            self.room.refused()
            again = True
        self.inside.append(number)
        self.room.admitted()
        self._leaving[number] = asyncio.Event()
        await self._leaving[number].wait()
        self.inside.remove(number)
        self.room.leave()

    async def send_out(self, number: int) -> None:
        """Let one leave, and the next one come."""
        self._leaving[number].set()
        await settle()


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_no_more_than_the_most_are_in_and_the_others_come_in_their_order() -> None:
    crowd = Crowd(Room(2), places=9)
    visits = [asyncio.create_task(crowd.visit(number)) for number in range(5)]
    await settle()
    assert crowd.inside == [0, 1]
    for number, inside in ((1, [0, 2]), (0, [2, 3]), (2, [3, 4]), (3, [4]), (4, [])):
        await crowd.send_out(number)
        assert crowd.inside == inside
    await asyncio.gather(*visits)
    assert crowd.room.taken == 0


async def test_what_was_refused_once_waits_until_somebody_leaves() -> None:
    crowd = Crowd(Room(), places=2)
    visits = [asyncio.create_task(crowd.visit(number)) for number in range(6)]
    await settle()
    assert (crowd.inside, crowd.knocks, crowd.room.taken) == ([0, 1], 6, 2)
    for _ in range(6):
        await crowd.send_out(crowd.inside[0])
    await asyncio.gather(*visits)
    assert crowd.knocks == 6 + 4, "one knock for each place that became free"


async def test_now_and_then_one_tries_for_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "LONGEST_PAUSE_S", 0.002)
    crowd = Crowd(Room(), places=0)  # other clients of the server hold all of it
    visits = [asyncio.create_task(crowd.visit(number)) for number in range(3)]
    await settle()
    assert (crowd.inside, crowd.room.taken) == ([], 0)
    crowd.places = 2
    async with asyncio.timeout(5):
        while len(crowd.inside) < 2:
            await asyncio.sleep(0.001)
    crowd.places = 3
    async with asyncio.timeout(5):
        while len(crowd.inside) < 3:
            await asyncio.sleep(0.001)
    for number in (0, 1, 2):
        await crowd.send_out(number)
    await asyncio.gather(*visits)


async def test_room_that_a_try_found_is_filled_again_as_soon_as_somebody_leaves() -> None:
    crowd = Crowd(Room(), places=1)
    visits = [asyncio.create_task(crowd.visit(number)) for number in range(4)]
    await settle()
    assert crowd.inside == [0]
    crowd.places = 2
    async with asyncio.timeout(5):
        while len(crowd.inside) < 2:
            await asyncio.sleep(0.001)
    await crowd.send_out(0)
    assert len(crowd.inside) == 2, "without a pause"
    for _ in range(3):
        await crowd.send_out(crowd.inside[0])
    await asyncio.gather(*visits)


async def test_a_try_never_goes_beyond_the_most() -> None:
    room = Room(1)
    await room.enter()
    waiting = asyncio.create_task(room.enter())
    await settle()
    room._learnt = 0
    room._try()
    await settle()
    assert (room.taken, waiting.done()) == (1, False)
    room.leave()
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_who_is_cancelled_leaves_the_line_or_gives_the_place_back() -> None:
    room = Room(1)
    await room.enter()
    first, second, third = (asyncio.create_task(room.enter()) for _ in range(3))
    await settle()
    first.cancel()
    await settle()
    room.leave()  # gives the place to the second, which is cancelled before it can take it
    second.cancel()
    await settle()
    assert (first.cancelled(), second.cancelled(), third.done(), room.taken) == (True, True, True, 1)
    room.leave()
    assert room.taken == 0
