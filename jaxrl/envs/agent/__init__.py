"""An agent as the environment: a program that speaks OpenAI's API plays the policy, and every token is recorded.

`environment` is the adapter, `gateway` the HTTP server that the program talks to, `bodies` what is said there, and `talk` what it comes
to in conversations of one rollout.
"""
