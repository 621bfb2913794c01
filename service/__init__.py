"""How others reach the cache: the face in one process, runners, the command line."""
