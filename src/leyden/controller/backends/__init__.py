"""Where harnesses run. `local`: processes of this machine."""
