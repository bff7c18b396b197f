"""Documents, and the code that writes their generated parts.

A package, so that `python -m docs.generate` means this one: an installed package of the same name would win over a plain folder.
"""
