"""Where everything listens that is for this machine alone."""

LOOPBACK_ADDRESS = "127.0.0.1"
