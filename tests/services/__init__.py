"""The real components that tests run publishd against: on free loopback ports, stopped by their process ids."""
