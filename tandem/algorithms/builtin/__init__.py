"""The built-in algorithms and losses, one a file: what is in this folder is what `algorithm.type` and
`algorithm.loss.type` may name, and the name is that of the file.

A file has a section with its defaults and its paper, and the class that does the arithmetic: an algorithm says how
rewards become advantages, a loss what is minimised with them, and some files have both. Every file is imported when a
configuration is read, so torch is imported in the functions that need it, and not at the top.
"""
