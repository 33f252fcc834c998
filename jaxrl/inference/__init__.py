"""Talking to a policy: the endpoint protocol, the pool that routes to endpoints, and messages to token ids and back."""
