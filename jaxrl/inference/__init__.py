"""Talking to a model: the endpoint protocol, the pools that route to endpoints, and messages to token ids and back.

`pool` is the policy's, `frozen` that of a model that is never trained. The embedded engine's client is an endpoint in `jaxrl.engine`;
here is that of a server (`http`, `wire`, `backoff`). `rendering` makes tokens of messages and takes replies apart, `chat` is the API that
agents speak. `vocabulary` tells whether a served model has the policy's tokens; `hub` finds a model's files.
"""
