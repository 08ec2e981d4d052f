"""Tools that the policy may call: Python functions, classes, servers."""
