"""OpenAI's chat API as text: its shapes (`wire`), the conversations that are remembered, replies told as they come, refusals.

Shared by the served model and by the gateway of an agent that is an environment.
"""
