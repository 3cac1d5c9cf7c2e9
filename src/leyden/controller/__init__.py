"""Starts, watches and grades harness runs, and reports them to the gateway."""
