"""Read rows of data: name them, encode them, count what they hold, and say why one cannot be used.

Begin with `source.py`.
"""
