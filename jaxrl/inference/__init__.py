"""Talking to a policy: the endpoint protocol, the pool that routes to endpoints, sessions that record turns, and rendering."""
