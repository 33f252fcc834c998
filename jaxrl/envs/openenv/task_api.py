"""The client of OpenEnv's Task API: which splits a server has, how many tasks, and what each of them is.

In: the server's address, an environment of it. Out: splits and task specs, as the server gives them. Every route only reads, so a request
whose connection was lost is sent once more, on a new connection; nothing else is tried again. How many tasks a split has is asked of
`num_tasks`: `tasks` may be a preview.

| answer              | is raised as              |
|---------------------|---------------------------|
| 400                 | `IndexError`              |
| 404                 | `UnknownEnvironmentError` |
| 422                 | `ValueError`              |
| 501                 | `NotImplementedError`     |
| any other, nonsense | `TaskAPIError`            |
| none                | `EnvUnreachableError`     |
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from jaxrl.blame import headline
from jaxrl.envs.openenv.addresses import http_url, is_loopback, shown_url
from jaxrl.errors import ConfigError, EnvUnreachableError, TaskAPIError, UnknownEnvironmentError
from jaxrl.inference.rendering.messages import whole_characters

T = TypeVar("T")

_LOST_CONNECTIONS = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)
"""The connection went away under a request: a server closes an idle one after it answered 500 on it."""
_RAISED_AS = {400: IndexError, 404: UnknownEnvironmentError, 422: ValueError, 501: NotImplementedError}

_END = object()


class TaskAPIClient:
    """Lists the tasks of one environment of an OpenEnv server. Used from one event loop; `sync` is for plain code.

    Example:
      >>> client = TaskAPIClient.from_ws_url("ws://127.0.0.1:8000/ws", env_name="sums")
      >>> client.base_url, client.env_name
      ('http://127.0.0.1:8000', 'sums')
    """

    def __init__(self, base_url: str, env_name: str | None = None, timeout: float = 30.0, page_size: int = 256, retries: int = 1) -> None:
        """Open no connection yet.

        Args:
          base_url: the server, `http` or `https`; `ws` and `wss` are taken, too.
          env_name: which of its environments; None takes the only one.
          timeout: seconds for one request and its answer.
          page_size: tasks that `iter_tasks` asks for at once.
          retries: how often a request is sent again after its connection was lost.

        Raises:
          ValueError: an argument is out of range, or `base_url` is no address.
          ConfigError: environment variables name a proxy that needs a package.
        """
        if not (timeout > 0 and page_size >= 1 and retries >= 0):
            raise ValueError(f"expected timeout > 0, page_size >= 1 and retries >= 0, got {timeout!r}, {page_size!r} and {retries!r}")
        self.base_url = http_url(base_url)
        self._shown_url = shown_url(self.base_url)
        self.env_name = env_name
        self._timeout_s = timeout
        self._page_size = page_size
        self._retries = retries
        self._client = self._connect()

    @classmethod
    def from_ws_url(cls, url: str, **options: Any) -> TaskAPIClient:
        """Return the client of the server whose episodes are played at `url`; `options` are those of the class."""
        return cls(http_url(url), **options)

    def sync(self) -> SyncTaskAPIClient:
        """Return a client of the same server for code without an event loop."""
        return SyncTaskAPIClient(self.base_url, self.env_name, self._timeout_s, self._page_size, self._retries)

    async def list_environments(self) -> list[str]:
        """Return the names of the server's environments.

        Raises:
          NotImplementedError: the server has no such route, so it has no Task API.
        """
        try:
            names = await self._ask("GET", "/list_environments")
        except UnknownEnvironmentError as error:
            raise NotImplementedError(f"{self._shown_url} has no Task API: {error}") from error
        return self._list(names, "/list_environments", str)

    async def list_splits(self) -> list[dict[str, Any]]:
        """Return the splits, each with its `name` and `type`."""
        return self._list(await self._ask_env("GET", "splits"), "splits", dict)

    async def list_tasks(self, split: str) -> list[Any]:
        """Return tasks of a split; a server may leave some out, see `iter_tasks`."""
        return self._list(await self._ask_env("POST", "tasks", {"split": split}, key="tasks"), "tasks", object)

    async def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        number = await self._ask_env("POST", "num_tasks", {"split": split}, key="num_tasks")
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise TaskAPIError(f"{self._shown_url}: `num_tasks` of split {split!r} must be a whole number, got {number!r:.100}")
        return number

    async def get_task(self, split: str, index: int) -> Any:
        """Return one task.

        Raises:
          IndexError: the split has none of that index.
        """
        if index < 0:
            raise IndexError(f"task index {index} of split {split!r} is negative")
        return await self._ask_env("POST", "task", {"split": split, "index": index}, key="task")

    async def get_task_range(self, split: str, start: int = 0, stop: int | None = None) -> list[Any]:
        """Return the tasks from `start` to before `stop`, as a slice would; None goes to the end.

        Raises:
          ValueError: an end is negative, which servers understand in different ways.
        """
        if start < 0 or (stop is not None and stop < 0):
            raise ValueError(f"a range of tasks begins and ends at 0 or above, got {start} to {stop}")
        body = {"split": split, "start": start} | ({} if stop is None else {"stop": stop})
        return self._list(await self._ask_env("POST", "task_range", body, key="tasks"), "task_range", object)

    async def iter_tasks(self, split: str, limit: int | None = None) -> AsyncIterator[Any]:
        """Yield the tasks of a split in the order of their indices, all of them or the first `limit`.

        They are asked for page by page; a server that has no ranges is asked for one after the other.

        Raises:
          TaskAPIError: a page is shorter or longer than what was asked for.
        """
        total = await self.num_tasks(split)
        if limit is not None:
            total = min(total, limit)
        start, has_ranges = 0, True
        while start < total:
            stop = min(start + self._page_size, total)
            if has_ranges:
                try:
                    page = await self.get_task_range(split, start, stop)
                except NotImplementedError:
                    has_ranges = False
                    continue
            else:
                page = [await self.get_task(split, index) for index in range(start, stop)]
            if len(page) != stop - start:
                raise TaskAPIError(
                    f"{self._shown_url}: split {split!r} has {total} tasks, and the range from {start} to {stop} came with {len(page)}"
                )
            for task in page:
                yield task
            start = stop

    async def close(self) -> None:
        """Close idle connections."""
        await self._client.aclose()

    async def __aenter__(self) -> TaskAPIClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _connect(self) -> httpx.AsyncClient:
        # Certificates take 0.1 s to load, and an address of plain HTTP needs none.
        verify = self.base_url.startswith("https")
        try:
            return httpx.AsyncClient(timeout=self._timeout_s, trust_env=not is_loopback(self.base_url), verify=verify)
        except ImportError as error:
            raise ConfigError(f"{self._shown_url}: the proxy that environment variables name for it cannot be used: {error}") from error

    async def _name(self) -> str:
        if self.env_name is None:
            names = await self.list_environments()
            if len(names) != 1:
                raise UnknownEnvironmentError(
                    f"{self._shown_url} has {len(names)} environments; name one of them: {', '.join(names) or 'none'}"
                )
            self.env_name = names[0]
        return self.env_name

    async def _ask_env(self, method: str, route: str, body: dict[str, Any] | None = None, key: str | None = None) -> Any:
        """Return the answer of a route of the environment, or what it holds under `key`."""
        path = f"/{quote(await self._name(), safe='')}/{route}"
        answer = await self._ask(method, path, body)
        if key is None:
            return answer
        if not isinstance(answer, dict) or key not in answer:
            raise TaskAPIError(f"{self._shown_url}{path}: expected an object with `{key}`, got {answer!r:.200}")
        return answer[key]

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of one answer; the module says what others are raised as."""
        response = await self._send(method, path, body)
        where = f"{method} {self._shown_url}{path}"
        if response.status_code != 200:
            kind = _RAISED_AS.get(response.status_code, TaskAPIError)
            raise kind(f"{where}: the server answered {response.status_code}: {_detail(response)}")
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise TaskAPIError(f"{where}: the answer is no JSON: {response.text[:200]!r}") from error

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """Return the answer to one request, which is sent again if its connection is lost."""
        where, url = f"{method} {self._shown_url}{path}", self.base_url + path
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    return await self._client.request(method, url, json=body)
                except _LOST_CONNECTIONS as error:
                    lost: Exception = error
                for _ in range(self._retries):
                    try:
                        async with self._connect() as fresh:  # others of the pool may be lost, too
                            return await fresh.request(method, url, json=body)
                    except _LOST_CONNECTIONS as error:
                        lost = error
                raise EnvUnreachableError(f"{where}: the connection was lost: {headline(lost)}") from lost
        except httpx.TimeoutException as error:
            raise EnvUnreachableError(f"{where}: no answer after {self._timeout_s:g} s: {headline(error)}") from error
        except TimeoutError as error:
            raise EnvUnreachableError(f"{where}: no answer after {self._timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise EnvUnreachableError(f"{where}: the server cannot be reached: {headline(error)}; is it running there?") from error

    def _list(self, value: Any, what: str, kind: type) -> list[Any]:
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise TaskAPIError(f"{self._shown_url}: `{what}` must be a list of {kind.__name__}s, got {value!r:.200}")
        return value


class SyncTaskAPIClient:
    """`TaskAPIClient` for plain code: its methods return when the answer is there, also while an event loop runs in this thread.

    Takes the arguments of `TaskAPIClient`. A thread of its own talks to the server; close it, or use it in a `with` block.
    """

    def __init__(self, base_url: str, env_name: str | None = None, timeout: float = 30.0, page_size: int = 256, retries: int = 1) -> None:
        self._client = TaskAPIClient(base_url, env_name, timeout, page_size, retries)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="task API client", daemon=True)
        self._thread.start()

    @classmethod
    def from_ws_url(cls, url: str, **options: Any) -> SyncTaskAPIClient:
        """Return the client of the server whose episodes are played at `url`; `options` are those of the class."""
        return cls(http_url(url), **options)

    @property
    def base_url(self) -> str:
        """The server."""
        return self._client.base_url

    def list_environments(self) -> list[str]:
        """See `TaskAPIClient.list_environments`."""
        return self._run(self._client.list_environments())

    def list_splits(self) -> list[dict[str, Any]]:
        """See `TaskAPIClient.list_splits`."""
        return self._run(self._client.list_splits())

    def list_tasks(self, split: str) -> list[Any]:
        """See `TaskAPIClient.list_tasks`."""
        return self._run(self._client.list_tasks(split))

    def num_tasks(self, split: str) -> int:
        """See `TaskAPIClient.num_tasks`."""
        return self._run(self._client.num_tasks(split))

    def get_task(self, split: str, index: int) -> Any:
        """See `TaskAPIClient.get_task`."""
        return self._run(self._client.get_task(split, index))

    def get_task_range(self, split: str, start: int = 0, stop: int | None = None) -> list[Any]:
        """See `TaskAPIClient.get_task_range`."""
        return self._run(self._client.get_task_range(split, start, stop))

    def iter_tasks(self, split: str, limit: int | None = None) -> Iterator[Any]:
        """See `TaskAPIClient.iter_tasks`."""
        tasks = self._client.iter_tasks(split, limit)
        while (task := self._run(_next(tasks))) is not _END:
            yield task

    def close(self) -> None:
        """Close connections and end the thread. May be called twice."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> SyncTaskAPIClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, request: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(request, self._loop).result()


async def _next(tasks: AsyncIterator[Any]) -> Any:
    return await anext(tasks, _END)


def _detail(response: httpx.Response) -> str:
    """Return what a server says about its refusal."""
    try:
        detail = response.json()
    except (ValueError, RecursionError):
        return response.text[:200].strip() or "nothing"
    return whole_characters(str(detail.get("detail", detail) if isinstance(detail, dict) else detail)[:500])
