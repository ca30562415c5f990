"""specrun: an offline batch runner for large language models that decides at every step whether to speculate."""

__version__ = "0.1.0"
