"""Graders of other frameworks: their verdicts on answers, which the stand-ins of
those frameworks return.

Written from what the graders do, and held to it by verdicts of the originals in
`tests/compat/grader_verdicts.json`.
"""
