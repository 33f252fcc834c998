"""Tools, and the environment in which the policy may call them.

`tool` says what one is, `calculator` and `python` make some, `arguments` checks what they are called with, `toolbox` answers
the calls of a reply, `environment` plays questions with it. Calls are parsed from sampled ids elsewhere (`inference.rendering.replies`).
"""
