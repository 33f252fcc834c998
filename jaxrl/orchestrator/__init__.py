"""The asyncio arm's pipeline: draw a task, play its group, credit it, filter it, batch it, ship it, take the next version."""
