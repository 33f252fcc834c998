"""Environments behind an OpenEnv server: the client of its Task API, a session of one episode, and the environment made of both.

In: the address of a server. Out: task specs, and an `Environment` that plays them there.
"""

from jaxrl.envs.openenv.task_api import SyncTaskAPIClient, TaskAPIClient

__all__ = ["SyncTaskAPIClient", "TaskAPIClient"]
