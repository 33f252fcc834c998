"""`python -m jaxrl.eval ENV_SPEC (--llm-endpoint URL --model NAME | --checkpoint DIR) [--env.KEY VALUE ...]`: measure a model on tasks.

`request` reads what is asked, `command` has it evaluated (`launch.evaluating`), prints what came of it, and turns the outcome into an exit
code: 0 ok, 1 it failed or no episode was scored, 2 the command line or the configuration is wrong, 3 not reproducible, 4 a task regressed,
5 a server cannot be reached, 130 Ctrl-C. Whatever is played stands in the folder, and the same command goes on from there.
"""

from jaxrl.eval.command import main
from jaxrl.eval.request import read_request

__all__ = ["main", "read_request"]
