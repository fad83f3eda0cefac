"""Graders of other frameworks: their verdicts on answers, which the stand-ins of those frameworks
return.

Written from what the graders do, and held to it by verdicts of the originals in
`tests/compat/grader_verdicts.json`.

`hendrycks` and `minerva` compare texts after rewriting, `symbolic` compares by SymPy, and
`verified` by math-verify. `boxes` finds the answers in replies.
"""
