"""The study: which method keeps how much quality, at what sparsity, from one command.

`plan` says what is to be made, `work` makes one part of one row, `schedule` makes what is missing
in order of value, `document` writes what was found. `python -m eval.study --help`.
"""
