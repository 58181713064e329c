"""publishd decides when a checkpoint save is complete, publishes it, resolves the latest one and prunes old ones."""

__version__ = "0.1.0"
