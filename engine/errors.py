"""What can go wrong in the engine, apart from a single request."""


class EngineError(Exception):
    """The engine cannot go on; the text says why and what to do."""


class ModelError(EngineError):
    """The model or the device cannot be used; the text names it and the mend."""
