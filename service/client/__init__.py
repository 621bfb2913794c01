"""Clients of a daemon: the face of `tiercache.service.face` for a process beside it, async and blocking."""
