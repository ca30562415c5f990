"""The commands of `specrun`, one a module: each reads its options, calls what does the work, and shows what came of it.

Everything heavy is imported inside them: `specrun --help` answers at once.
"""
