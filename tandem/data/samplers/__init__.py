"""The orders of rows, one a file: what is in this folder is what `data.sampler.type` may name, and the name is that of
the file.

A file has a section, a `SamplerKind` that makes the sampler of a run (`MakesSampler`), and the class that draws. Every
file is imported when a configuration is read: no torch, transformers or pyarrow at the top.
"""
