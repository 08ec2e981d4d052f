"""Model-written code runs here: programs in, what they printed out, never more.

`base.py` has the limits and the choice; `local.py` runs on this machine, `remote.py` on a SandboxFusion server;
`harness.py` is the program that tests a solution in there, and `tests.py` sends it in and reads its verdict.
"""
