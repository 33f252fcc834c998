"""An agent as the environment: a program that speaks OpenAI's API plays the policy, and every token is recorded.

`environment` is the adapter, `gateway` the HTTP server that the program talks to, `bodies` what is said there, `talk` what it comes to in
conversations of one rollout, and `attending` waits for the program. All but the adapter are there for whatever else plays a program.
"""
