"""The policy behind OpenAI's chat route, on this machine: a program of somebody else's asks there, and every token is recorded.

`server` is the HTTP server that the program talks to, `bodies` what is said there, `talk` what it comes to in conversations of one rollout,
and `attending` waits for the program. The environments that play a program so (`envs.agent`, `envs.verifiers`) do not know one another.
"""
