"""The kinds of tools, one a file: what is in this folder is what the `type` of a section of
`conversation.environment.tools` may name, and the name is that of the file.

A file has a section, a `ToolsConfig` that makes its sets of tools (`MakesTools`). Every file is imported when a
configuration is read, so what it needs is imported in its functions, and not at the top.
"""
