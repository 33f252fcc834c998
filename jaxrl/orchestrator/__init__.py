"""The asyncio arm's pipeline: draw a task, play its group, credit it, filter, batch, ship, take the next version."""
